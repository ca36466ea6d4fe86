"""How the workers of an own loader start decides whether the server that forks them is protected from signals."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

import pytest
from own_loops import tensors
from torch.utils.data import DataLoader

from cluster_ddp.train.own.loader_copy import LoaderCopy


class Protected(Exception):
    """In place of starting the server."""


@pytest.fixture(autouse=True)
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise Protected

    monkeypatch.setattr(forkserver, "ensure_running", start)


def loader(context: str | None) -> LoaderCopy:
    return LoaderCopy(DataLoader(tensors(), 22, num_workers=1, multiprocessing_context=context))


def test_a_server_that_the_loader_itself_asks_for_is_protected() -> None:
    with pytest.raises(Protected):
        list(loader("forkserver"))


def test_a_server_that_is_the_default_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "forkserver")
    with pytest.raises(Protected):
        list(loader(None))
    assert len(list(loader("fork"))) == 2
