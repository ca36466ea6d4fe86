"""``python -m cluster_ddp.train.probe``: checks on the login node whether a task or script could start.

The argument, ``task`` or ``script``, says what the request is about, so that torch is imported while the request is
still being prepared. The request is a JSON object on standard input: ``script``; or ``task``, ``params`` (a list of the
parameter sets that the task may get), ``lr``, ``weight_decay``, ``small`` and ``seconds``.

The answer is a JSON object on standard output: ``wrong``, what this package finds wrong with the task; or ``error``,
any other error of its import; or ``refused``, pairs of an index into ``params`` and what is wrong with them;
``untried``, how many of them were not tried because ``seconds`` had passed; and ``bytes``, the
size of the first model and its optimizer's state, if it can be found without allocating memory and the model is larger
than ``small``. Scripts are parsed, not run; a task's data sets are not created.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.process import gc_paused


def main() -> None:
    """Answer one request. What the user's module prints goes to standard error."""
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        if sys.argv[1] == "task":
            with gc_paused(freeze=True):
                import cluster_ddp.train.task  # noqa: F401 - while the request is being prepared
                from cluster_ddp.train.ranks.deferred_dynamo import defer_dynamo

                defer_dynamo()

        asked = json.load(sys.stdin)
        said = _script(Path(asked["script"])) if "script" in asked else _task(asked)
    except ClusterDDPError as error:
        said = {"wrong": _own_words(error)}
    except BaseException as error:  # a module may also call sys.exit
        said = {"error": _described(error)}
    os.write(answer, json.dumps(said).encode())
    os._exit(0)  # regardless of threads that the module has started


def _task(asked: dict[str, Any]) -> dict[str, Any]:
    from cluster_ddp.train.task import find_task

    kind = find_task(asked["task"])
    looks: dict[int, _Look] = {}
    until = time.monotonic() + asked["seconds"]
    for index in _order(len(asked["params"])):
        if looks and time.monotonic() > until:
            break
        looks[index] = _look(kind, asked["params"][index], asked if index == 0 else None)
    # If no model could be built, the cause may be this machine, which lacks a GPU or the data.
    built = any(look.built for look in looks.values())
    refused = sorted((i, look.error) for i, look in looks.items() if look.error and (look.by_task or built))
    return {"refused": refused, "untried": len(asked["params"]) - len(looks), "bytes": looks[0].size}


def _order(count: int) -> list[int]:
    """Index 0, then the others shuffled: if time is short, all regions of a grid are sampled."""
    rest = list(range(1, count))
    random.Random(0).shuffle(rest)
    return [0, *rest]


@dataclass
class _Look:
    """The result of trying a task with one set of parameters."""

    error: str | None = None
    by_task: bool = True  # the error comes from the task itself, not its model
    built: bool = False
    size: int | None = None  # bytes of the model and its optimizer's state, if requested


def _look(kind: type[Any], params: dict[str, Any], sizes: dict[str, Any] | None) -> _Look:
    """Create a task and its model without memory for them, and compute their size if `sizes` requests it."""
    import torch

    from cluster_ddp.train.errors import TaskError
    from cluster_ddp.train.task import expect_params

    look = _Look()
    try:
        expect_params(kind, params)
        with torch.device("meta"):
            task = kind(**params)
            look.by_task = False
            model = task.model()
            look.built = True
            if sizes is not None:
                look.size = _state_bytes(task, model, sizes)
    except TaskError as error:
        look.error = None if look.built else _own_words(error)
    except (ValueError, TypeError, AssertionError) as error:
        if not look.built and "meta" not in str(error):  # errors that only occur without memory
            look.error = f"it rejects the params: {_described(error)}"
    except Exception:  # it needs a GPU or its data: nothing can be found out here
        return look
    return look


def _state_bytes(task: Any, model: Any, asked: dict[str, Any]) -> int | None:
    import torch

    def size(tensors: Iterable[Any]) -> int:
        return sum(value.numel() * value.element_size() for value in tensors if isinstance(value, torch.Tensor))

    kept = size(model.state_dict().values())
    if kept <= asked["small"]:  # an optimizer's step without memory imports a lot, a third of a second
        return None
    task.weight_decay = asked["weight_decay"]
    optimizer = task.optimizer(model, asked["lr"])
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return kept + sum(size(state.values()) for state in optimizer.state.values())


def _script(script: Path) -> dict[str, Any]:
    sys.path.insert(0, str(script.parent))
    tree = ast.parse(script.read_bytes(), str(script))
    for name, line in _imports(tree):
        if importlib.util.find_spec(name) is None:
            return {"error": f"ModuleNotFoundError: No module named {name!r} ({script}:{line})"}
    return {}


def _imports(module: ast.Module) -> Iterator[tuple[str, int]]:
    """The packages that a script certainly imports: not inside a function or a condition."""
    for node in module.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node.lineno


def _own_words(error: ClusterDDPError) -> str:
    """What one of this package's own errors says, without the key, which the report begins with."""
    return str(error).removeprefix("task: ")


def _described(error: BaseException) -> str:
    """The error in one line, with the last place outside Python's own machinery and this package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    theirs = frames and Path(frames[-1].filename).parent != Path(__file__).parent
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if theirs else ""
    said = traceback.format_exception_only(error)[-1].strip()
    return f"{said}{where}"


if __name__ == "__main__":
    main()
