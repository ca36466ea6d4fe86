"""``python -m cluster_ddp.train.probe``: whether the ranks' interpreter can begin, asked on the login node.

It reads a JSON object from standard input: ``script``, or ``task`` and ``params`` with ``lr``, ``weight_decay`` and
``small``.
Its answer is a JSON object on standard output: ``error``, or ``bytes`` of the model and the optimizer's state where
they can be told without memory for them, and the model has more than ``small`` of them. A script is read, not run; of a
task no data is made.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer one question. What the user's module prints goes to standard error."""
    answer = os.dup(1)
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    try:
        said = _script(Path(asked["script"])) if "script" in asked else _task(asked)
    except BaseException as error:  # a module may call sys.exit, too
        said = {"error": _described(error)}
    os.write(answer, json.dumps(said).encode())
    os._exit(0)  # whatever threads the module has begun


def _task(asked: dict[str, Any]) -> dict[str, Any]:
    from cluster_ddp.train.task import find_task

    kind = find_task(asked["task"], asked["params"])
    with contextlib.suppress(Exception):  # a model that needs a GPU or its data: nothing is known of its size then
        return _state_bytes(kind, asked)
    return {}


def _state_bytes(kind: type[Any], asked: dict[str, Any]) -> dict[str, int]:
    import torch

    def size(tensors: Iterable[Any]) -> int:
        return sum(value.numel() * value.element_size() for value in tensors if isinstance(value, torch.Tensor))

    with torch.device("meta"):
        task = kind(**asked["params"])
        model = task.model()
        kept = size(model.state_dict().values())
        if kept <= asked["small"]:  # an optimizer imports torch's compiler, a second that tells nothing here
            return {}
        task.weight_decay = asked["weight_decay"]
        optimizer = task.optimizer(model, asked["lr"])
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    return {"bytes": kept + sum(size(state.values()) for state in optimizer.state.values())}


def _script(script: Path) -> dict[str, Any]:
    sys.path.insert(0, str(script.parent))
    tree = ast.parse(script.read_bytes(), str(script))
    for name, line in _imports(tree):
        if importlib.util.find_spec(name) is None:
            return {"error": f"ModuleNotFoundError: No module named {name!r} ({script}:{line})"}
    return {}


def _imports(module: ast.Module) -> Iterator[tuple[str, int]]:
    """The packages that a script imports for sure: in no function, and under no condition."""
    for node in module.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node.lineno


def _described(error: BaseException) -> str:
    """The error in one line, with the last place outside of Python's own machinery."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    said = traceback.format_exception_only(error)[-1].strip()
    return f"{said}{where}"


if __name__ == "__main__":
    main()
