"""Finding the address by which the other nodes reach this host."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
import time
from collections.abc import Callable

from cluster_ddp import exit_statuses
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.launch.variables import ADDRESS_VARIABLE
from cluster_ddp.printing import say
from cluster_ddp.process import host_name

LOOPBACK = "127.0.0.1"
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
ON_LOOPBACK = {ADDRESS_VARIABLE: LOOPBACK, "NCCL_SOCKET_IFNAME": _INTERFACE, "GLOO_SOCKET_IFNAME": _INTERFACE}
"""The variables of nodes that are all on this machine."""

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # the discard service's; connecting a UDP socket sends nothing
_NAME_PAUSE_SECONDS = 2.0
_DOCUMENTATION_ADDRESS = "192.0.2.1"  # routed nowhere, so it takes the default route


class AddressError(ClusterDDPError):
    """This node has no address that the others can reach."""

    exit_status = exit_statuses.RUN_FAILED


def local_address(master: str, *, nodes: int, interface: str | None = None) -> str:
    """Return the address that ranks on other nodes connect to when a rank of this node is rank 0.

    The first of these that exists: the address of the interface that the job names, the source address of the route to
    the master, the address of this host's name in DNS, the address of the default route. Loopback addresses are used
    only for runs of one node. (Debian's /etc/hosts maps a host's own name to a loopback address, which must not be
    used.)

    Raises
    ------
    AddressError
        There is none.
    """
    if nodes == 1:
        return LOOPBACK
    candidates = [
        interface_address(interface) if interface else None,
        _route_to(master),
        *_own_names(),
        _route_to(_DOCUMENTATION_ADDRESS),
    ]
    for candidate in candidates:
        if candidate and not ipaddress.ip_address(candidate).is_loopback:
            return candidate
    raise AddressError(
        f"{socket.gethostname()} has no address that other nodes can reach: the route to {master!r} and the host's own "
        "name lead to loopback only\n    name the interface to use: network.socket_ifname"
    )


def wait_for_name(
    host: str,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until a host's name resolves, so that a brief outage of the name service costs no attempt.

    Raises
    ------
    AddressError
        It does not resolve in time.
    """
    deadline, said = clock() + seconds, False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if clock() >= deadline:
                raise AddressError(
                    f"the address of the first node, {host}, did not resolve on {host_name()} within {seconds:.0f} s: "
                    f"{error}\n    see /etc/hosts and DNS there"
                ) from error
            if not said:
                say(f"cluster-ddp: {host} does not resolve on {host_name()} ({error}): waiting for the name service")
            said = True
            sleep(_NAME_PAUSE_SECONDS)


def interface_address(pattern: str) -> str | None:
    """Return the address of the first interface that NCCL_SOCKET_IFNAME matches (prefixes; ``=`` exact; ``^`` not)."""
    if pattern.startswith("^"):
        return None
    exact = pattern.startswith("=")
    names = [name for name in pattern.lstrip("=").split(",") if name]
    for _, interface in socket.if_nameindex():
        if interface in names or (not exact and interface.startswith(tuple(names))):
            found = _address_of(interface)
            if found is not None:
                return found
    return None


def interface_for_gloo(address: str) -> str | None:
    """Return the interface to set for Gloo, the one that has `address`; None if Gloo finds it by itself.

    Gloo listens on the first usable address of the host's own name, or on loopback if there is none. Debian's
    /etc/hosts maps that name to a loopback address, where no other node could reach it.
    """
    if ipaddress.ip_address(address).is_loopback:
        return None
    listens = next(filter(_is_here, _own_names()), LOOPBACK)
    if not ipaddress.ip_address(listens).is_loopback:
        return None
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    """Return the first IPv4 address of an interface."""
    import fcntl  # not on Windows, where this package is a library only

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        packed = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        return socket.inet_ntoa(packed[20:24])
    return None


def _is_here(address: str) -> bool:
    """Whether this host can listen on an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.bind((address, 0))
        return True
    return False


def _route_to(host: str) -> str | None:
    """Return the source address of packets to a host; None if its name does not resolve or there is no route."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def _own_names() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in found]
