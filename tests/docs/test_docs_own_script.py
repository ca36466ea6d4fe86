"""docs/own-script.md tells the truth: its script is stopped and resumed by cluster-ddp without a trace in the bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from documented import FINDS_RANKS, Call, block, finish, stop_in_the_middle, wait_for
from safetensors.numpy import load_file

PAGE = "docs/own-script.md"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder that holds the page's script and job file."""
    (tmp_path / "digits_by_hand.py").write_text(block(PAGE, "python"))
    (tmp_path / "by-hand.yaml").write_text(block(PAGE, "yaml"))
    return tmp_path


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows}


def weights(folder: Path, step: int) -> dict[str, bytes]:
    """The bytes of all tensors of a checkpoint, whatever shards they lie in."""
    shards = (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {name: array.tobytes() for shard in shards for name, array in load_file(shard).items()}


# With three ranks the order of sums matters, as with one and two it does not.
@FINDS_RANKS
@pytest.mark.parametrize(("ranks", "steps"), [(1, 3000), (3, 600)])
def test_the_script_is_stopped_and_resumed_exactly(here: Path, call: Call, ranks: int, steps: int) -> None:
    changes = (f"--procs={ranks}", "--set", f"args=['{steps}']")
    running = call("cluster_ddp", "local", "by-hand.yaml", *changes)
    run = wait_for(lambda: next(here.glob("runs/*"), None))
    stop_in_the_middle(call, running, "by-hand", run)

    status = json.loads(finish(call("cluster_ddp", "status", "by-hand", "--json")))
    assert (status["state"], status["total_steps"]) == ("STOPPED", steps)
    assert 10 <= status["step"] == status["last_checkpoint"] < steps
    finish(call("cluster_ddp", "resume", "by-hand"))
    status = json.loads(finish(call("cluster_ddp", "status", "by-hand", "--json")))
    assert (status["state"], status["step"], status["attempts"]) == ("COMPLETED", steps, 2)

    if ranks == 1:
        finish(call("digits_by_hand", str(steps)))
    else:
        finish(call("torch.distributed.run", "--nproc-per-node", str(ranks), "digits_by_hand.py", str(steps)))
    calm = here / "by-hand"
    assert losses(run) == losses(calm)
    assert weights(run, steps) == weights(calm, steps)
    assert len(losses(calm)) == steps // 10


def test_the_script_is_short() -> None:
    assert len(block(PAGE, "python").splitlines()) <= 60


def test_the_diff_leads_to_the_script() -> None:
    diff = [line for line in block(PAGE, "diff").splitlines() if line.strip() not in ("", "...")]
    script = iter(block(PAGE, "python").splitlines())
    # In this order; an iterator that is searched goes on from where the line before was found.
    assert [line for line in diff if line[0] in " +" and line[1:] not in script] == []
    assert len([line for line in diff if line[0] == "-"]) > 5
