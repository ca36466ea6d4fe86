"""Any bytes in any file of a run, or of a sweep: every command has an answer, in time, and shows the neighbour."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hostile_runs import FILES, OTHERS, Commands, check, make_bad_run, make_bad_sweep, use
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# Not made smaller: what failed is told by its labels, and an example that has no answer takes half a minute.
FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=9), below, max_size=4),
    max_leaves=10,
)


def spoil(path: Path, data: st.DataObject) -> None:
    """Leave a file as it is, or write anything into it, or remove it."""
    content = path.read_bytes()
    places = st.integers(0, 5000)
    kind = data.draw(st.sampled_from(["as it is", "bytes", "cut", "flipped", "value", "gone"]), label=path.name)
    if kind == "bytes":
        content = data.draw(st.binary(max_size=2000))
    elif kind == "cut":
        content = content[: data.draw(places) % (len(content) + 1)]
    elif kind == "flipped" and content:
        at = data.draw(places) % len(content)
        content = content[:at] + data.draw(st.binary(min_size=1, max_size=3)) + content[at + 1 :]
    elif kind == "value":
        fields = json.loads(content)
        for field in fields or ["x"]:
            fields[field] = data.draw(JSON, label=field)
        content = json.dumps(fields).encode() + b"\n"
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(content)


@settings(FUZZ, max_examples=12, derandomize=True)
@given(data=st.data())
def test_any_bytes_in_any_file_leave_every_command_with_an_answer(
    folder: Path, commands: Commands, data: st.DataObject
) -> None:
    spoil_a_run(folder, commands, data)


@settings(FUZZ, max_examples=5, derandomize=True)
@given(data=st.data())
def test_any_bytes_in_a_sweep_leave_every_command_with_an_answer(
    folder: Path, commands: Commands, data: st.DataObject
) -> None:
    spoil_a_sweep(folder, commands, data)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@settings(FUZZ, max_examples=200)
@given(data=st.data())
def test_any_bytes_in_all_files_of_many_runs_leave_every_command_with_an_answer(
    folder: Path, commands: Commands, data: st.DataObject
) -> None:
    spoil_a_run(folder, commands, data)
    spoil_a_sweep(folder, commands, data)


def spoil_a_run(folder: Path, commands: Commands, data: st.DataObject) -> None:
    shutil.rmtree(folder / "bad", ignore_errors=True)
    bad = make_bad_run(folder).path
    for name in (*FILES, *OTHERS):
        spoil(bad / name, data)
    check(commands, listed_by=("list", "status") if (bad / "run.json").exists() else ())
    use(commands)


def spoil_a_sweep(folder: Path, commands: Commands, data: st.DataObject) -> None:
    shutil.rmtree(folder / "bad-sweep", ignore_errors=True)
    bad = make_bad_sweep(folder).path
    for path in (*(bad / name for name in (*FILES, *OTHERS)), bad.parent / "sweep.json", bad.parent / "job.sbatch"):
        spoil(path, data)
    check(commands, "bad-sweep", listed_by=["list"] if (bad.parent / "sweep.json").exists() else ())
    use(commands, "bad-sweep")
    use(commands, str(bad))
