"""What several refusals advise."""

from __future__ import annotations

FIND_UNUSED = (
    "let DDP look for them (a task: train.find_unused_parameters: true; a custom loop: DistributedDataParallel(..., "
    'find_unused_parameters=True); Lightning: strategy="ddp_find_unused_parameters_true"), or set requires_grad=False '
    "for them"
)


CALL_IT = (
    "on several ranks only model(...) sums the gradients, so loss() has to call it, not one of its methods, "
    "model.module or a model stored in self; move what a method such as encode() does into forward(), and select it by "
    'an argument: model(x, "encode")'
)
