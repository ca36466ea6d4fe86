"""The rendezvous of torchrun's agents: torch's own c10d rendezvous, with signatures and restricted listening addresses.

torch's store has no authentication, and the state that the agents of a run exchange there is a pickle: whoever reaches
the port could run code as the run's owner. So every state is signed with the attempt's key, which is in the attempt's
folder and readable only by its owner, and a state without a valid signature is refused before it is unpickled. The
address at which the ranks meet is signed, too.

The ranks meet at a store of the agent with the first ranks, a new one each time they are started: restarted ranks would
hang on the keys of the dead ones. It listens only on this node's own address. So does the agents' store if all agents
are on this machine; otherwise it listens on all addresses, as torch's does, since the name by which the others look up
this node may resolve to any of them.

This runs inside the agent, and is the only file of this package that imports torch's rendezvous.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import ipaddress
import os
import socket
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from cluster_ddp.launch.torchrun.agent_failure import Meeting
from cluster_ddp.launch.torchrun.command import option
from cluster_ddp.process import host_name
from cluster_ddp.run.directory import KEY_BYTES
from cluster_ddp.run.reading import read_file

SIGNED = "c10d-signed"
_SIGNATURE_BYTES = 32
_STATE, _ADDRESS, _ID = b"state", b"address", b"id"  # signed too: no kind of message can pass for a different one
_ADDRESS_NAME = "cluster_ddp.address"
_CAME = "cluster_ddp.came"  # how many agents have reached the store; with a number, the host of one
_STORE_SECONDS = 60  # torch's own read_timeout
_BACKLOG = 2048  # torch's own: all ranks may connect at once
# Signs of life that a node may miss before the others drop it: 150 years' worth. Nodes judge that by their own clocks:
# if a node's clock is 15 s behind, or it stood still for that long, the others would train without it.
_MISSED = 10**9


def sign_rendezvous(argv: list[str], key_file: Path) -> None:
    """Make the torchrun that this process becomes use the signed rendezvous instead of c10d.

    Parameters
    ----------
    argv
        torchrun's command line, which is changed.
    key_file
        The attempt's key.

    Raises
    ------
    OSError
        The key cannot be read.
    """
    key = read_file(key_file, KEY_BYTES)
    if len(key) < KEY_BYTES:
        raise OSError(errno.EINVAL, f"has {len(key)} bytes, and a key has {KEY_BYTES}", str(key_file))
    signer, log_dir = Signer(key), Path(option(argv, "--log-dir"))
    rendezvous_handler_registry.register(SIGNED, lambda parameters: make_rendezvous(parameters, signer, log_dir))
    argv[argv.index("--rdzv-backend=c10d")] = f"--rdzv-backend={SIGNED}"
    # torch would make a store for the ranks that listens on all addresses; `Rendezvous` makes one that does not.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


class Signer:
    """Signs what the agents of one attempt send each other, and accepts nothing else."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def digest(self, what: bytes, message: bytes) -> bytes:
        """Compute the signature, which differs for each kind of message."""
        return hmac.digest(self._key, what + b"\0" + message, "sha256")

    def signed(self, what: bytes, message: bytes) -> bytes:
        """Return the message, preceded by its signature."""
        return self.digest(what, message) + message

    def checked(self, what: bytes, data: bytes) -> bytes:
        """Verify the signature and return the message.

        Raises
        ------
        RendezvousStateError
            It was not written by anyone who has the key.
        """
        signature, message = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self.digest(what, message)):
            raise RendezvousStateError(
                f"the {what.decode()} in the rendezvous store is not signed with this attempt's key: another program, "
                "or another run on the same port, writes to it"
            )
        return message


class SignedBackend(RendezvousBackend):
    """torch's backend, with signed states."""

    def __init__(self, backend: C10dRendezvousBackend, signer: Signer) -> None:
        self._backend = backend
        self._signer = signer

    @property
    def name(self) -> str:
        """See the base class."""
        return SIGNED

    def get_state(self) -> tuple[bytes, Token] | None:
        """See the base class."""
        found = self._backend.get_state()
        return None if found is None else (self._signer.checked(_STATE, found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See the base class."""
        found = self._backend.set_state(self._signer.signed(_STATE, state), token)
        return None if found is None else (self._signer.checked(_STATE, found[0]), found[1], found[2])


class Rendezvous(DynamicRendezvousHandler):
    """torch's rendezvous of agents, which also decides where the ranks meet."""

    signer: Signer
    address: str
    log_dir: Path
    agents_store: TCPStore
    _ranks_store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """See the base class: the agent makes the store of the ranks."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See the base class."""
        try:
            info = super().next_rendezvous()
        except RendezvousTimeoutError:
            with contextlib.suppress(RuntimeError):  # the store is gone
                came = self._who_came()
                Meeting(came=came).record(self.log_dir)
                raise RendezvousTimeoutError(f"nodes that came: {', '.join(came)}") from None
            raise
        if info.world_size != self.settings.min_nodes:
            Meeting(too_few=True).record(self.log_dir)
            raise RendezvousStateError(f"{info.world_size} of {self.settings.min_nodes} nodes have met")
        if info.rank == 0:
            self._ranks_store = None  # closes the previous one
            self._ranks_store = store = _listening_store(self.address, 0)
            info.store.set(_ADDRESS_NAME, self.signer.signed(_ADDRESS, f"{self.address} {store.port}".encode()).hex())
        told = self.signer.checked(_ADDRESS, bytes.fromhex(info.store.get(_ADDRESS_NAME).decode()))
        address, port = told.decode().split(" ")
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(address, int(port)))

    def _who_came(self) -> tuple[str, ...]:
        store = self.agents_store
        return tuple(store.get(f"{_CAME}.{n}").decode() for n in range(1, store.add(_CAME, 0) + 1))


def make_rendezvous(
    parameters: RendezvousParameters, signer: Signer, log_dir: Path, *, may_miss: int = _MISSED
) -> Rendezvous:
    """Return one agent's part in a rendezvous of agents with the same key.

    Parameters
    ----------
    log_dir
        Where the agent records how the rendezvous failed.
    may_miss
        Signs of life that a node may miss before the others drop it.
    """
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    assert parameters.local_addr is not None
    is_host = parameters.get_as_bool("is_host")
    if ipaddress.ip_address(parameters.local_addr).is_loopback:
        host = parameters.local_addr  # all agents are on this machine
        store = _listening_store(host, port) if is_host else _store(host, port, is_host=False)
    else:
        store = _store(host, port, is_host=bool(is_host))
    store.set(f"{_CAME}.{store.add(_CAME, 1)}", host_name())
    unguessable = signer.digest(_ID, parameters.run_id.encode()).hex()
    seconds = {name: parameters.get_as_int(f"{name}_timeout") for name in ("join", "last_call")}
    handler = Rendezvous.from_backend(
        parameters.run_id,
        store,
        SignedBackend(C10dRendezvousBackend(store, unguessable), signer),
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        RendezvousTimeout(**{name: timedelta(seconds=value) for name, value in seconds.items() if value is not None}),
    )
    assert isinstance(handler, Rendezvous)
    object.__setattr__(handler.settings, "keep_alive_max_attempt", may_miss)  # older torch has no argument for it
    handler.signer, handler.address, handler.agents_store = signer, parameters.local_addr, store
    handler.log_dir = log_dir
    return handler


def _store(host: str, port: int, *, is_host: bool) -> TCPStore:
    return TCPStore(host, port, is_master=is_host, multi_tenant=True, timeout=timedelta(seconds=_STORE_SECONDS))


def _listening_store(address: str, port: int) -> TCPStore:
    """Return a store that listens on one address only; port 0 means any free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        make = functools.partial(
            TCPStore,
            address,
            listener.getsockname()[1],
            is_master=True,
            multi_tenant=True,
            timeout=timedelta(seconds=_STORE_SECONDS),
            master_listen_fd=listener.detach(),
        )
        try:
            return make()
        except NotImplementedError:  # libuv, which serves many ranks faster, takes no socket in older torch
            return make(use_libuv=False)
