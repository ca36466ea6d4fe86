"""Where agents and ranks meet: nobody without the attempt's key is believed, and no port is open wider than need be."""

from __future__ import annotations

import base64
import os
import pickle
import re
import stat
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any

import pytest
from node_process import Node
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from waiting import wait_for

from cluster_ddp.launch.ports import free_port
from cluster_ddp.launch.torchrun import rendezvous
from cluster_ddp.launch.torchrun.agent_failure import Meeting
from cluster_ddp.launch.torchrun.command import option
from cluster_ddp.launch.torchrun.rendezvous import Rendezvous, SignedBackend, Signer, make_rendezvous
from cluster_ddp.run.directory import AttemptDirectory

needs_keys = pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="this torch's store does not list its keys")
Start = Callable[..., Node]


def endpoint(node: Node) -> tuple[str, int]:
    host, _, port = option(node.command, "--rdzv-endpoint").rpartition(":")
    return host, int(port)


def connected(host: str, port: int) -> TCPStore | None:
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
    except RuntimeError:
        return None


class Attack:
    """What a stranger would have an agent unpickle."""

    def __init__(self, done: Path) -> None:
        self._done = done

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._done,)


def state_keys(store: TCPStore) -> list[str]:
    """The names under which agents exchange their pickles."""
    names = [name.lstrip("/") for name in store.list_keys()]
    return [name for name in names if re.fullmatch(r"torch\.rendezvous\.[^./]*", name) and len(store.get(name)) > 100]


@needs_keys
def test_what_a_stranger_puts_into_the_store_is_never_unpickled(start_node: Start, tmp_path: Path) -> None:
    done = tmp_path / "done"
    node = start_node("plain_rank.py", nodes=2)  # it waits for the other one
    store = wait_for(lambda: connected(*endpoint(node)), "the store")
    (key,) = wait_for(lambda: state_keys(store), "the agent in the store")
    store.set(key, base64.b64encode(pickle.dumps(Attack(done))).decode())
    status, _, err = node.finish()
    assert status == 1
    assert not done.exists()
    (failed,) = node.events("node-failed")
    assert "not signed with this attempt's key" in failed["error"] and "not signed" in err


@needs_keys
def test_the_key_is_nobody_elses_to_read_and_the_id_in_the_store_cannot_be_guessed(start_node: Start) -> None:
    node = start_node("plain_rank.py", nodes=2)
    store = wait_for(lambda: connected(*endpoint(node)), "the store")
    (key,) = wait_for(lambda: state_keys(store), "the agent in the store")
    file = node.attempt.rendezvous_key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_uid == os.getuid()
    lines = [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in node.tree()]
    secrets = (key.rpartition(".")[2], file.read_bytes().hex())
    assert len(secrets[0]) == 64
    assert not any(secret.encode() in line for line in lines for secret in secrets)
    others = [path for path in node.attempt.run.path.rglob("*") if path.is_file() and path != file]
    assert not any(secret.encode() in path.read_bytes() for path in others for secret in secrets)


def test_a_state_is_believed_only_with_a_signature_of_its_own_kind() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plain = C10dRendezvousBackend(store, "id")
    ours, theirs = (SignedBackend(plain, Signer(key * 32)) for key in (b"a", b"b"))
    assert ours.get_state() is None
    state, token, is_set = ours.set_state(b"first") or (b"", None, False)
    assert (state, is_set) == (b"first", True)
    assert ours.set_state(b"second", b"of somebody else's") == (b"first", token, False)
    for put in (lambda: theirs.set_state(b"third", token), lambda: plain.set_state(b"third", token)):
        with pytest.raises(RendezvousStateError, match="not signed"):
            put()
            ours.get_state()
    signer = Signer(b"a" * 32)
    with pytest.raises(RendezvousStateError):
        signer.checked(b"state", signer.signed(b"address", b"127.0.0.1 1"))


def meet(
    monkeypatch: pytest.MonkeyPatch, behind: timedelta, log_dir: Path = Path("/nowhere"), **options: int
) -> list[int | Exception]:
    """Let two agents meet, the clock of the second being so much behind: the world that each is told, or its error."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - (behind if threading.current_thread().name == "behind" else timedelta())

        @classmethod
        def utcnow(cls) -> datetime:  # type: ignore[override]
            """For torch 2.4."""
            return cls.now(timezone.utc).replace(tzinfo=None)

    monkeypatch.setattr(dynamic_rendezvous, "datetime", Clock)
    signer, port = Signer(b"k" * 32), free_port()
    found: dict[str, int | Exception] = {}
    handlers: list[Rendezvous] = []  # with them their stores would end

    def agent(name: str) -> None:
        config = {"is_host": name == "host", "join_timeout": 5}
        parameters = RendezvousParameters("c10d", f"127.0.0.1:{port}", "7.0", 2, 2, "127.0.0.1", **config)
        try:
            handlers.append(handler := make_rendezvous(parameters, signer, log_dir, **options))
            found[name] = handler.next_rendezvous().world_size
        except Exception as error:
            found[name] = error

    for name in ("host", "behind"):
        threading.Thread(target=agent, args=(name,), name=name, daemon=True).start()
    wait_for(lambda: "host" in found, "the first agent has met the other")
    if found["host"] == 2:
        wait_for(lambda: "behind" in found, "so has the other")
    return [found["host"], found.get("behind", 0)]


def test_who_came_is_told_when_others_did_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster_ddp.launch.torchrun.rendezvous.host_name", lambda: "n1")
    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{free_port()}", "7.0", 2, 2, "127.0.0.1", is_host=True, join_timeout=1
    )
    with pytest.raises(RendezvousTimeoutError, match=r"^nodes that came: n1$"):
        make_rendezvous(parameters, Signer(b"k" * 32), tmp_path).next_rendezvous()
    assert Meeting.read(tmp_path).came == ("n1",)


@pytest.mark.parametrize("hours", [-1, 1, 500_000])
def test_a_node_whose_clock_is_wrong_is_not_left_out(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """The others trained without it, with a world of their own."""
    assert meet(monkeypatch, timedelta(hours=hours)) == [2, 2]


def test_agents_meet_where_libuv_takes_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.4: it would listen on all addresses by itself."""

    def older(*arguments: Any, master_listen_fd: int | None = None, use_libuv: bool = True, **options: Any) -> TCPStore:
        if master_listen_fd is None:
            return TCPStore(*arguments, **options)
        if use_libuv:
            raise NotImplementedError("The libuv TCPStore backend does not support initialization with an listen fd.")
        return TCPStore(*arguments, master_listen_fd=master_listen_fd, use_libuv=False, **options)

    monkeypatch.setattr(rendezvous, "TCPStore", older)
    assert meet(monkeypatch, timedelta()) == [2, 2]


def test_nobody_trains_in_a_smaller_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = meet(monkeypatch, timedelta(hours=1), tmp_path, may_miss=3)  # torch's own
    assert Meeting.read(tmp_path).too_few
    assert isinstance(alone, RendezvousError) and "1 of 2 nodes have met" in str(alone)


@pytest.mark.parametrize("content", [b"", b"short", None])
def test_an_attempt_without_a_whole_key_does_not_start(start_node: Start, content: bytes | None) -> None:
    def damage(attempt: AttemptDirectory) -> None:
        attempt.rendezvous_key.unlink()
        if content is not None:
            attempt.rendezvous_key.write_bytes(content)

    node = start_node("plain_rank.py", prepare=damage)
    status, _, _ = node.finish()
    assert status == 1
    (failed,) = node.events("node-failed")
    assert "rendezvous.key" in failed["error"]


def test_nobody_listens_on_more_than_loopback_where_all_nodes_are_on_this_machine(start_node: Start) -> None:
    node = start_node("meeting_rank.py")
    node.wait_for("has met the others")
    inodes = set()
    for process in [*node.tree()]:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    listeners = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                listeners[int(port, 16)] = address
    assert endpoint(node)[1] in listeners
    assert set(listeners.values()) == {"0100007F"}, listeners
    assert len(listeners) > 1, "the store of the ranks is one of its own"
