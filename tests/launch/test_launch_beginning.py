"""Beginning an attempt as a start of a Slurm job, and deciding what follows it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from starts import begin, end, happened, stand_in, start

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.keeper import beginning
from cluster_ddp.launch.keeper.batch_host import BatchHost
from cluster_ddp.launch.keeper.beginning import begin as begin_start
from cluster_ddp.launch.keeper.deciding import decide_after
from cluster_ddp.launch.keeper.patience import patiently
from cluster_ddp.run.attempt import begin_attempt, request_resume
from cluster_ddp.run.attempt_record import read_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.errors import RunAlive, RunEnded, RunError
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.stopfile import request_stop
from cluster_ddp.run.storage import Storage
from cluster_ddp.slurm.start import this_start


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    spec = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits", launch={"procs_per_node": 2})
    return create_run(spec, runs_dir=tmp_path, via="sbatch", script="#!/bin/bash\n")


def test_the_same_start_gets_its_attempt_again(run: RunDirectory) -> None:
    assert begin(run) == 0
    assert begin(run) == 0
    record = read_attempt(run.attempt(0))
    assert (record.slurm_job_id, record.nodes, record.procs) == ("77", 3, 2)
    assert record.process is not None
    assert record.process.pid == os.getpid()
    assert begin(run, restart=1) == 1


def test_a_heterogeneous_job_says_that_only_its_first_component_trains(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_start(run, this_start({"SLURM_JOB_ID": "77", "SLURM_HET_SIZE": "2"}), pid=os.getpid())
    assert "Slurm job 77 has 2 components" in capsys.readouterr().err


def test_nothing_begins_in_a_start_that_slurm_has_replaced(run: RunDirectory) -> None:
    """Its storage hung, or it was cut off from Slurm's controller; that the newer attempt is over changes nothing."""
    assert begin(run, restart=1) == 0
    end(run, 0, restart=1)
    with pytest.raises(RunAlive, match="this start of job 77 is out of date"):
        begin(run, restart=0)
    request_resume(run, by="a person")
    assert begin(run, restart=0) == 1, "Slurm starts to count its jobs again once it has lost its state"


def test_a_copy_goes_on_beside_its_original(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds says that the attempt of the original is its own, and that is alive."""
    begin(run)
    copied = RunDirectory(shutil.copytree(run.path, run.path.with_name("my-copy")))
    stand_in(tmp_path, monkeypatch, squeue=f"echo '77|77|RUNNING|n1|None@N/A|cluster_ddp {run.id}'")
    assert begin(copied, job="78") == 1
    with pytest.raises(RunAlive, match="is alive: attempt 0"):
        begin(run, job="78")
    with pytest.raises(RunAlive, match="is alive: attempt 1"):
        begin(copied, job="79")


@pytest.mark.parametrize(("patience", "begins"), [(20.0, True), (0.0, False)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE])
def test_a_disk_that_is_full_or_fails_for_a_while_is_waited_for(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    patience: float,
    begins: bool,
) -> None:
    calls: list[Path] = []

    def mkdir(self: Storage, path: Path, **options: Any) -> None:
        calls.append(path)
        if len(calls) < 3:
            raise OSError(number, os.strerror(number))
        path.mkdir(**options)

    monkeypatch.setattr(Storage, "mkdir", mkdir)

    def begin_after(patience: float) -> AttemptDirectory | None:
        def pause(_: float) -> None:
            """Tries again at once."""

        return patiently(
            lambda: begin_start(run, None, pid=os.getpid()),
            run,
            host=BatchHost(),
            pause=pause,
            unless=lambda: False,
            too_near=lambda: False,
            patience=patience,
        )

    if begins:
        attempt = begin_after(patience)
        assert attempt is not None and attempt.number == 0
        assert os.strerror(number) in capsys.readouterr().err
    else:
        with pytest.raises(RunError, match=os.strerror(number)):
            begin_after(patience)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_an_error_of_storage_that_does_not_pass_is_told_at_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def mkdir(self: Storage, path: Path, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Storage, "mkdir", mkdir)
    never = {"unless": lambda: False, "too_near": lambda: False}
    with pytest.raises(RunError, match=os.strerror(number)):
        patiently(lambda: begin_start(run, None, pid=os.getpid()), run, host=BatchHost(), pause=pytest.fail, **never)


def test_nothing_begins_while_another_attempt_is_alive(run: RunDirectory) -> None:
    begin_attempt(run, host="here", pid=os.getpid(), nodes=1, procs=1)
    with pytest.raises(RunAlive, match="is alive"):
        begin(run)


@pytest.mark.parametrize(
    ("queue", "begins"),
    [("76|76|RUNNING|n1|None|", False), ("76|76|PENDING||None|", True), ("", True), (None, False)],
)
def test_slurm_knows_whether_the_attempt_of_another_job_is_alive(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: str | None, begins: bool
) -> None:
    begin_attempt(run, slurm_job_id="76", host="elsewhere", pid=1, nodes=1, procs=1)
    record = run.attempt(0).record_file
    record.write_text(record.read_text().replace('"boot_id": "', '"boot_id": "x'))  # of another machine
    stand_in(tmp_path, monkeypatch, squeue="exit 1" if queue is None else f"echo '{queue}'")
    if begins:
        assert begin(run) == 1
    else:
        with pytest.raises(RunAlive):
            begin(run)


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_slurm_is_asked_again_while_its_controller_is_away(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """The next job of a chain ended for good: nobody could say whether the job before it, which was lost, was alive."""
    begin_attempt(run, slurm_job_id="76", host="elsewhere", pid=1, nodes=1, procs=1)
    record = run.attempt(0).record_file
    record.write_text(record.read_text().replace('"boot_id": "', '"boot_id": "x'))
    asked = tmp_path / "asked"
    away = f"echo >>{asked}; [ $(wc -l <{asked}) -gt 3 ] || {{ echo 'squeue: error: Connection refused' >&2; exit 1; }}"
    stand_in(tmp_path, monkeypatch, squeue=f"{away}\necho '76|76|NODE_FAIL||None|'")
    monkeypatch.setattr(beginning, "ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(beginning, "NO_ANSWER_SECONDS", patience)
    if patience:
        assert begin(run) == 1
    else:
        with pytest.raises(RunAlive, match="may be alive"):
            begin(run)


def test_only_a_person_starts_a_stalled_run_again(run: RunDirectory) -> None:
    begin(run)
    happened(run, "stalled", reason="no progress")
    with pytest.raises(RunEnded, match="cluster-ddp resume"):
        begin(run, restart=1)
    request_resume(run, by="a person")
    assert begin(run, restart=2) == 1


def test_the_decision_is_recorded(run: RunDirectory) -> None:
    begin(run)
    happened(run, "started", step=0, world_size=2, total_steps=10)
    happened(run, "checkpoint", step=5)
    request_stop(run.attempt(0), reason="time-limit", grace=60, by="the keeper")
    happened(run, "stopped", step=5, reason="time-limit")
    assert end(run, 0).action == "requeue"
    assert "requeued" in [event["event"] for event in read_events(run)]
    assert read_attempt(run.attempt(0)).ended


@pytest.mark.parametrize(("runs", "word"), [(True, "requeue"), (False, "stop")])
def test_a_sigterm_that_is_no_scancel_does_not_end_the_run(run: RunDirectory, runs: bool, word: str) -> None:
    begin(run)
    happened(run, "checkpoint", step=5)
    happened(run, "stopped", step=5, reason="terminated")
    assert decide_after(run.attempt(0), start(), job_goes_on=lambda: runs, writer="test").action == word


def test_a_node_that_slurm_calls_down_is_recorded_as_lost(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, sinfo="echo n2; echo n7")
    for number in (0, 1):
        begin(run, restart=number)
        for node in (1, 2):
            EventWriter(run, f"node-{node}").write("node-started", attempt=number, node=node, host=f"n{node}")
        EventWriter(run, "node-1").write("node-finished", attempt=number, node=1, outcome="failed")
    assert end(run, 1, restart=1).action == "requeue"
    lost = [(event["attempt"], event["host"]) for event in read_events(run) if event["event"] == "node-lost"]
    assert lost == [(0, "n2"), (1, "n2")]


@pytest.mark.parametrize(
    ("outcomes", "word"), [(("done", "done"), "done"), (("done", "failed"), "requeue"), (("done", None), "requeue")]
)
def test_the_node_programs_speak_for_a_script(run: RunDirectory, outcomes: tuple[str | None, ...], word: str) -> None:
    begin(run)
    for node, outcome in enumerate(outcomes):
        writer = EventWriter(run, f"node-{node}")
        writer.write("node-started", attempt=0, node=node, script=True)
        if outcome is not None:
            writer.write("node-finished", attempt=0, node=node, outcome=outcome, status=int(outcome == "failed"))
    assert end(run, 0).action == word
