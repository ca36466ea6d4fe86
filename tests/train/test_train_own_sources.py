"""What a loop that draws its batches itself takes them from, by run.steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from own_loops import begin_attempt, model_of, new_run, told
from torch import Tensor
from train_ranks import run_ranks

from cluster_ddp.train import join_run


class Reader:
    """As in llm.c and nanoGPT's successors."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.position, self.size = tokens, 0, 4

    def next_batch(self) -> Tensor:
        self.position += self.size
        return self.tokens[self.position - self.size : self.position]


def chunks(tokens: Tensor) -> Iterator[Tensor]:
    position = 0
    while True:
        yield tokens[position : position + 4]
        position += 4


def train(place: Path, is_kept: bool) -> None:
    """A loop that reads by a generator and an object, or that keeps where the object is."""
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.rand(60, 6)
        reader, given, unused = Reader(tokens), chunks(tokens), Reader(tokens)
        kept = run.keep(position=0)
        reader.position = kept.position if is_kept else 0
        for _ in run.steps(4, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            batch = reader.next_batch() if is_kept else reader.next_batch() + next(given)
            model(batch).square().mean().backward()
            optimizer.step()
            kept.position = reader.position if is_kept else 0
        assert unused.position == 0


def test_readers_and_generators_whose_place_is_not_kept_are_told(tmp_path: Path) -> None:
    kept, forgotten = new_run(tmp_path / "kept"), new_run(tmp_path / "forgotten")
    run_ranks(train, 1, kept.path, True)
    run_ranks(train, 1, forgotten.path, False)
    assert told(kept) == []
    (message,) = told(forgotten)
    assert message.startswith(
        "steps take batches from given, reader, whose position in the data no checkpoint contains"
    )
