"""Ranks do without torch's compiler until something compiles (test_train_program.py), and compiling is as ever then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_ranks import IS_DYNAMO_DEFERRED

from cluster_ddp.launch.variables import RUN_VARIABLE

pytestmark = pytest.mark.skipif(not IS_DYNAMO_DEFERRED, reason="this torch's optimizers need its compiler")

PROGRAM = """
import sys
from cluster_ddp.train.ranks.deferred_dynamo import defer_dynamo
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
from cluster_ddp.train.ranks.deferred_dynamo import defer_dynamo
defer_dynamo()
import torch

found = []

def compile_late():
    found.append(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
other = threading.Thread(target=compile_late)
other.start()
steps = 0
while other.is_alive():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch._dynamo.utils.get_optimize_ddp_mode()
    steps += 1
assert found == [2.0] and steps > 1, (found, steps)
print("done")
"""

OF_ONES_OWN = """
import sys
from cluster_ddp.train import join_run
import torch
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
print("torch._dynamo.config" in sys.modules)
"""


@pytest.mark.parametrize("of_a_run", [True, False])
def test_a_program_of_ones_own_does_without_it_as_a_rank_of_a_run(of_a_run: bool, tmp_path: Path) -> None:
    environment = {**os.environ, RUN_VARIABLE: str(tmp_path)}
    if not of_a_run:
        del environment[RUN_VARIABLE]
    program = [sys.executable, "-c", OF_ONES_OWN]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == f"{not of_a_run}\n", done.stderr


def test_a_step_while_another_thread_compiles_for_the_first_time() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr


def test_what_is_compiled_late_is_compiled_as_ever() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr
