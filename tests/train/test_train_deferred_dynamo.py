"""Ranks do without torch's compiler until something compiles (test_train_program.py), and compiling is as ever then."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from cluster_ddp.train.deferred_dynamo import defer_dynamo
defer_dynamo()
import torch
import torch._dynamo
deferred = torch._dynamo

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert "torch._dynamo.config" not in sys.modules, "an optimizer needs more of it"
assert deferred.utils.get_optimize_ddp_mode() == "ddp_optimizer" and not hasattr(deferred, "__wrapped__")

calls = []

@torch.compiler.disable
def own():
    calls.append(torch.compiler.is_compiling())

assert "torch._dynamo.config" in sys.modules, "what is one's own is disabled at once"
assert torch._dynamo is deferred is sys.modules["torch._dynamo"]
assert deferred.utils is sys.modules["torch._dynamo.utils"]
assert deferred.utils.get_optimize_ddp_mode() == "ddp_optimizer"
import torch._dynamo.testing
assert torch._dynamo.testing.CompileCounter

graphs = []

def count(graph, inputs):
    graphs.append(graph)
    return graph

@torch.compile(backend=count)
def step(x):
    own()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.add_param_group({"params": [torch.nn.Parameter(x.clone())]})
    return x + 1

assert step(torch.ones(1, 2)).tolist() == [[2.0, 2.0]] and len(graphs) >= 1
assert calls == [False]
add = torch.optim.Optimizer.add_param_group.__wrapped__
assert getattr(add, "__dynamo_disable") is not add, "torch's own, used before, are disabled late"
print("done")
"""

IN_A_THREAD = """
import threading
from cluster_ddp.train.deferred_dynamo import defer_dynamo
defer_dynamo()
import torch

def compile_late():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
other = threading.Thread(target=compile_late)
other.start()
while other.is_alive():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch._dynamo.utils.get_optimize_ddp_mode()
print("done")
"""


def test_a_step_while_another_thread_compiles_for_the_first_time() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr


def test_what_is_compiled_late_is_compiled_as_ever() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr
