"""Whether two runs were one and the same training: weights, optimizer state, losses and samples, bit by bit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Logged = dict[int, dict[str, Any]]
# What metrics.jsonl tells about an attempt rather than about the training.
OF_THE_ATTEMPT = ("attempt", "time")
MEASURED = ("samples_per_second", "seconds_per_step", "data_wait", "communication_wait")


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def newest_manifest(run: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((checkpoints(run)[-1] / "manifest.json").read_text())
    return manifest


def newest_tensors(run: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint by name."""
    folder = checkpoints(run)[-1]
    manifest = newest_manifest(run)
    shards = {name: load_file(folder / name) for name in manifest["shards"]}
    return {name: shards[place["shard"]][name] for name, place in manifest["tensors"].items()}


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a torn last line is left out."""
    found = []
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def logged(run: Path) -> Logged:
    """What was logged for each step; of a value that was logged more than once, that of the highest attempt.

    Not all of a step's values need come from one attempt: one may train the step, and the next evaluate it.
    """
    best: Logged = {}
    for line in sorted(lines(run / "metrics.jsonl"), key=lambda line: int(line["attempt"])):
        best.setdefault(line["step"], {}).update(line)
    return best


def trained_steps(run: Path) -> dict[int, set[int]]:
    """The steps that each attempt trained, as rank 0 noted them at once; metrics are written a moment later."""
    files = {int(attempt.name): attempt / "samples-rank0.jsonl" for attempt in (run / "attempts").iterdir()}
    return {number: {line["step"] for line in lines(file)} for number, file in files.items() if file.exists()}


def repeated_steps(run: Path) -> list[int]:
    """The steps that more than one attempt trained."""
    attempts = Counter(step for steps in trained_steps(run).values() for step in steps)
    return sorted(step for step, count in attempts.items() if count > 1)


def sample_ids(run: Path) -> dict[int, list[int]]:
    """The samples that each step trained on, over all ranks; of a repeated step, those of its last time."""
    found: dict[int, tuple[int, list[int]]] = {}
    for attempt in sorted((run / "attempts").iterdir()):
        number = int(attempt.name)
        for path in sorted(attempt.glob("samples-rank*.jsonl")):
            # Ranks that were restarted inside the allocation repeat steps within one file.
            for step, mine in {line["step"]: line["ids"] for line in lines(path)}.items():
                at, ids = found.get(step, (-1, []))
                found[step] = (number, [*(ids if at == number else []), *mine])
    return {step: ids for step, (_, ids) in sorted(found.items())}


def training_values(run: Path) -> dict[int, dict[str, Any]]:
    """Of what was logged, all that is a function of the training: losses, learning rate, evaluation."""
    return {
        step: {k: v for k, v in line.items() if k not in OF_THE_ATTEMPT + MEASURED}
        for step, line in sorted(logged(run).items())
    }


def assert_same_training(run: Path, calm: Path) -> None:
    """Fail with what differs, unless both runs ended with the same bits after the same losses."""
    ours, theirs = newest_manifest(run), newest_manifest(calm)
    assert ours["step"] == theirs["step"]
    assert ours["samples"] == theirs["samples"]
    assert ours["scalars"] == theirs["scalars"]
    mine, reference = newest_tensors(run), newest_tensors(calm)
    assert sorted(mine) == sorted(reference)
    assert any(name.startswith("model.") for name in mine)
    assert any(name.startswith("optimizer.") for name in mine)
    assert [name for name in mine if not torch.equal(mine[name], reference[name])] == []
    losses = {step: line["train/loss"] for step, line in training_values(run).items() if "train/loss" in line}
    assert sorted(losses) == list(range(1, ours["step"] + 1)), "a step has no logged loss"
    values, expected = training_values(run), training_values(calm)
    assert [step for step in expected if values.get(step) != expected[step]] == []
    assert sample_ids(run) == sample_ids(calm)


def assert_every_sample_once(run: Path, samples: int, steps_per_epoch: int) -> None:
    """Fail unless each epoch trained on each of the data set's samples exactly once."""
    by_step = sample_ids(run)
    assert len(by_step) % steps_per_epoch == 0
    steps = sorted(by_step)
    for first in range(0, len(steps), steps_per_epoch):
        ids = [sample for step in steps[first : first + steps_per_epoch] for sample in by_step[step]]
        assert sorted(ids) == list(range(samples)), f"epoch of the steps from {steps[first]}"
