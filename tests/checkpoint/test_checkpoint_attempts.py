"""Two attempts of one run at once: what the older one does beyond the newer one's place neither counts nor harms."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import RUN_ID, Recorder, equal_bits
from crashing_storage import Killed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster_ddp.checkpoint import coordinator, retention
from cluster_ddp.checkpoint.checkpointer import Checkpointer
from cluster_ddp.checkpoint.errors import AttemptSuperseded
from cluster_ddp.checkpoint.folders import this_process
from cluster_ddp.checkpoint.format import digest, encode
from cluster_ddp.checkpoint.retention import Retention
from cluster_ddp.checkpoint.verify import list_checkpoints, newest_intact, verify
from cluster_ddp.job import CheckpointSpec
from cluster_ddp.run.directory import RunDirectory, steps_in
from cluster_ddp.run.lineage import Origin, read_lineage, read_origin, record_origin, steps_that_count
from cluster_ddp.run.storage import Storage


class Hooked(Storage):
    """Does something before its operation number `at`, and dies before number `dies`. Nothing is flushed."""

    def __init__(self) -> None:
        self.count, self.at, self.dies = 0, -1, -1
        self.act: Callable[[], None] = lambda: None

    def arm(self, at: int, act: Callable[[], None], dies: int | None) -> None:
        self.count, self.at, self.act, self.dies = 0, at, act, -1 if dies is None else dies

    def _turn(self) -> None:
        number, self.count = self.count, self.count + 1
        if number == self.at:
            self.act()
        if number == self.dies:
            raise Killed

    def open_write(self, path: Path, mode: int = 0o644) -> int:
        self._turn()
        return super().open_write(path, mode)

    def write(self, fd: int, data: bytes | bytearray | memoryview) -> None:
        self._turn()
        super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._turn()

    def rename(self, source: Path, target: Path) -> None:
        self._turn()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._turn()
        super().unlink(path)

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        self._turn()
        super().mkdir(path, mode)

    def rmtree(self, path: Path) -> None:
        self._turn()
        super().rmtree(path)

    def fsync_dir(self, path: Path) -> None:
        self._turn()


class Attempt:
    """An attempt on a machine of its own: what it trains tells from which attempts it went on, and where.

    Attributes
    ----------
    durable
        The last state that it has restored, or knows to be saved: the step, and what tells of it.
    """

    def __init__(self, run: RunDirectory, number: int, storage: Storage | None = None, **kept: Any) -> None:
        run.attempt(number).path.mkdir(parents=True)
        self.number, self.step, self.state = number, 0, torch.zeros(64, dtype=torch.int64)
        self.events = Recorder()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coordinator, "this_process", lambda: _process_of(number))
            self.checkpointer = Checkpointer(
                run.checkpoints,
                run_id=RUN_ID,
                job_digest="digest",
                settings=CheckpointSpec(**{"keep_last": 1, "background": False, **kept}),
                attempt=number,
                report=self.events,
                storage=storage or Hooked(),
            )
        self.origin: tuple[int, Tensor] = (0, self.state.clone())
        self.durable = self.origin

    def resume(self) -> Attempt:
        restored = self.checkpointer.restore({"model.trained": self.state})
        self.step = restored.step if restored is not None else 0
        self.origin = self.durable = (self.step, self.state.clone())
        return self

    def train(self, step: int) -> Attempt:
        """Each step is marked with the attempt that trained it."""
        self.state[self.step : step] = self.number + 1
        self.step = step
        return self

    def save(self) -> bool:
        before = len(self.events.of("checkpoint"))
        self.checkpointer.save(
            step=self.step, samples=0, epoch=0, tensors={"model.trained": self.state}, scalars={}, metrics={}
        )
        durable = len(self.events.of("checkpoint")) > before
        if durable:
            self.durable = (self.step, self.state.clone())
        return durable


def _process_of(number: int) -> str:
    """Who the attempt's process is; the odd ones run on this machine, and are known to be gone when looked up."""
    _, pid, namespace, started, boot = this_process().split("~")
    return "~".join((f"host{number}", pid, namespace, started, "another-boot" if number % 2 == 0 else boot))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.path.mkdir()
    return made


def _hold_up(patch: pytest.MonkeyPatch) -> None:
    """As for processes that ask whether there is a newer attempt, act on the answer an hour later, and are killed."""
    patch.setattr(retention, "attempt_numbers", lambda run: [])
    patch.setattr(Retention, "tidy_up", lambda self, newest: {})


def _is_at(attempt: Attempt, place: tuple[int, Tensor]) -> bool:
    return attempt.step == place[0] and equal_bits(attempt.state, place[1])


def test_each_attempt_records_what_it_goes_on_from(run: RunDirectory) -> None:
    first = Attempt(run, 0).resume()
    assert read_origin(run.attempt(0)) == Origin(None)
    first.train(10).save()
    Attempt(run, 1).resume()
    folder, manifest, _ = newest_intact(run.checkpoints, RUN_ID)
    assert read_origin(run.attempt(1)) == Origin(10, manifest.digest)
    assert f'"{manifest.digest}"' in (folder / "manifest.json").read_text()
    assert manifest.attempt == 0


def test_attempt_that_cannot_record_it_does_not_train(run: RunDirectory) -> None:
    Attempt(run, 0).resume().train(10).save()
    second = Attempt(run, 1)
    run.attempt(1).origin_file.mkdir()
    with pytest.raises(Exception, match=r"attempt 1 cannot record in .*origin\.json"):
        second.resume()


def test_superseded_attempt_publishes_and_removes_nothing(run: RunDirectory) -> None:
    old = Attempt(run, 0).resume()
    old.train(10).save()
    Attempt(run, 1).resume()
    assert not old.train(20).save()
    (told,) = old.events.of("checkpoint-skipped")
    assert told["step"] == 20 and "a newer attempt" in told["reason"]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000010"]
    with pytest.raises(AttemptSuperseded, match="attempt 0 ends"):
        old.train(30).save()


def test_abandoned_checkpoint_is_named_counts_for_nothing_and_goes_in_time(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old attempt was held up between its question and what it did then, and killed after that."""
    old = Attempt(run, 0, keep_last=5).resume()
    old.train(10).save()
    new = Attempt(run, 1, keep_last=5).resume()
    with monkeypatch.context() as patch:
        _hold_up(patch)
        assert old.train(20).save() and old.train(40).save()
    assert steps_in(run.checkpoints) == [10, 20, 40]
    assert steps_that_count(run.checkpoints, read_lineage(run)) == [10]
    listed = {info.step: info for info in list_checkpoints(run.checkpoints, RUN_ID, read_all=True)}
    assert [(listed[step].state, listed[step].attempt) for step in (10, 20, 40)] == [
        ("verified", 0), ("abandoned", 0), ("abandoned", 0)
    ]  # fmt: skip
    assert "attempt 1 went on from step 10" in listed[20].problems[0]
    assert newest_intact(run.checkpoints, RUN_ID)[1].step == 10

    assert new.train(20).save(), "the step's name was taken"
    assert steps_in(run.checkpoints) == [10, 20]
    assert newest_intact(run.checkpoints, RUN_ID)[1].attempt == 1
    abandoned = [info for info in list_checkpoints(run.checkpoints, RUN_ID, read_all=False) if info.attempt == 0]
    assert [(info.step, info.state) for info in abandoned] == [(10, "complete"), (40, "abandoned")]
    assert abandoned[1].path.name == "abandoned-step-00000040-attempt-000"

    assert new.train(30).save() and abandoned[1].path.exists(), "it is beyond what the newer one has proven"
    assert new.train(50).save() and not abandoned[1].path.exists()
    assert steps_in(run.checkpoints) == [10, 20, 30, 50]
    assert _is_at(Attempt(run, 2).resume(), new.durable)


def _as_older_versions_wrote(run: RunDirectory) -> None:
    for path in run.checkpoints.glob("step-*/manifest.json"):
        body = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "attempt"}
        path.write_bytes(encode({**body, "digest": digest(body)}))


def test_checkpoints_of_older_versions_count_as_before(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their manifests name no attempt, and their attempts record no origin."""
    run.attempt(0).path.mkdir(parents=True)
    old = Attempt(run, 1)
    old.train(10).save()
    old.train(20).save()
    _as_older_versions_wrote(run)
    assert steps_that_count(run.checkpoints, read_lineage(run)) == [20]
    new = Attempt(run, 2).resume()
    assert _is_at(new, old.durable)
    with monkeypatch.context() as patch:
        _hold_up(patch)
        old.train(30).save()
    _as_older_versions_wrote(run)
    assert steps_that_count(run.checkpoints, read_lineage(run)) == [20] == [new.durable[0]]
    assert new.train(30).save()
    assert _is_at(Attempt(run, 3).resume(), new.durable)


def test_restart_inside_the_attempt_keeps_its_place(run: RunDirectory) -> None:
    Attempt(run, 0).resume().train(10).save()
    new = Attempt(run, 1, keep_last=3).resume()
    new.train(20).save()
    new.resume()
    assert new.step == 20
    assert read_lineage(run).origins[1].step == 10
    for step in (10, 20):  # both prove damaged: it has to go back further than where it began
        shutil.rmtree(run.checkpoints / f"step-{step:08d}")
    new.state.zero_()
    new.resume()
    assert (new.step, read_lineage(run).origins[1].step) == (0, None)
    record_origin(run.attempt(1), Origin(10), Storage())
    assert read_lineage(run).origins[1].step is None


def test_unreadable_manifest_is_damage_not_an_abandoned_checkpoint(run: RunDirectory) -> None:
    """Nothing of it is removed, and the restore says what is wrong with it."""
    Attempt(run, 0).resume().train(10).save()
    new = Attempt(run, 1, keep_last=5).resume()
    new.train(20).save()
    (run.checkpoints / "step-00000020/manifest.json").write_bytes(b"\0" * 5000)
    new.train(30).save()
    assert steps_in(run.checkpoints) == [10, 20, 30]
    assert [info.state for info in list_checkpoints(run.checkpoints, RUN_ID, read_all=False)][1] == "damaged"


# -- every interleaving of two attempts, at every operation ------------------------------------------------------------


def _operations(folder: Path) -> int:
    storage, old = _trained(folder)
    storage.arm(-1, lambda: None, None)
    old.train(20).save()
    return storage.count


def _trained(folder: Path) -> tuple[Hooked, Attempt]:
    run = RunDirectory(folder)
    run.path.mkdir()
    storage = Hooked()
    old = Attempt(run, 0, storage).resume()
    old.train(5).save()
    old.train(10).save()
    return storage, old


@pytest.mark.parametrize("saves", [(), (20,), (15, 20, 25)], ids=["it only resumes", "same step", "beyond"])
def test_newer_attempt_begins_at_every_operation_of_an_older_ones_save(tmp_path: Path, saves: tuple[int, ...]) -> None:
    """And the older one goes on from there, or is killed soon after that."""
    count = _operations(tmp_path / "counted")
    assert count > 10
    for at, later in itertools.product(range(count + 1), [None, 0, 1, 3]):
        dies = None if later is None else at + later
        folder = tmp_path / f"{at}-{dies}"
        run = RunDirectory(folder)
        storage, old = _trained(folder)
        begun: list[Attempt] = []

        def begin(run: RunDirectory = run, begun: list[Attempt] = begun) -> None:
            new = Attempt(run, 1).resume()
            begun.append(new)
            for step in saves:
                assert new.train(step).save() or step <= new.origin[0], new.events

        storage.arm(at, begin, dies)
        with contextlib.suppress(Killed):
            old.train(20).save()
        if not begun:
            begin()
        (new,) = begun
        assert new.origin[0] in (10, 20), "the newest was there, or the one before"
        assert set(new.origin[1][: new.origin[0]].tolist()) == {1}
        _check_chain(run, new, why=f"newer attempt at {at}, killed at {dies}")
        shutil.rmtree(folder)


def _check_chain(run: RunDirectory, newest: Attempt, why: str) -> None:
    """What a next attempt finds is what the newest has made durable, or has gone on from; nothing else counts."""
    wanted = newest.durable
    following = Attempt(run, newest.number + 1).resume()
    assert _is_at(following, wanted), f"{why}: {following.step}, not {wanted[0]}: {sorted(run.checkpoints.iterdir())}"
    following.train(following.step + 30).save()
    for step in steps_in(run.checkpoints):
        verify(run.checkpoints / f"step-{step:08d}", RUN_ID)
    for path in run.checkpoints.iterdir():
        assert path.name.startswith(("step-", "tmp-")), f"{why}: {path.name} stays"


Act = tuple[str, int, bool]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "save", "save", "save"]), st.integers(0, 2), st.booleans()), max_size=14
    ),
    st.integers(1, 3),
)
def test_whatever_the_order_one_chain_counts(
    tmp_path_factory: pytest.TempPathFactory, acts: list[Act], keep_last: int
) -> None:
    """Up to four attempts begin and save in any order; some saves come from one that was held up since it asked."""
    run = RunDirectory(tmp_path_factory.mktemp("interleaved") / "run")
    run.path.mkdir()
    attempts = [Attempt(run, 0, keep_last=keep_last).resume()]
    for act, which, held_up in acts:
        if act == "begin":
            if len(attempts) < 4:
                expected = attempts[-1].durable
                attempts.append(Attempt(run, len(attempts), keep_last=keep_last).resume())
                assert _is_at(attempts[-1], expected)
            continue
        attempt = attempts[which % len(attempts)]
        newest = attempt is attempts[-1]
        with contextlib.suppress(AttemptSuperseded), pytest.MonkeyPatch.context() as patch:
            if held_up and not newest:
                _hold_up(patch)
            assert attempt.train(attempt.step + 2).save() or not newest
        _check_what_counts(run, attempts)
    _check_chain(run, attempts[-1], why=str(acts))


def _check_what_counts(run: RunDirectory, attempts: list[Attempt]) -> None:
    lineage = read_lineage(run)
    for info in list_checkpoints(run.checkpoints, RUN_ID, read_all=False):
        if info.state != "complete" or info.attempt is None or info.step is None:
            continue
        ends = [later.origin[0] for later in attempts if later.number > info.attempt]
        assert info.step <= min(ends, default=info.step), "it counts, and is beyond a newer attempt's place"
        assert lineage.counts(info.attempt, info.step)
