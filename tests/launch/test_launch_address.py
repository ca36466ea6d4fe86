from __future__ import annotations

import fcntl
import socket
from typing import Any

import pytest

from cluster_ddp.launch.address import (
    AddressError,
    interface_address,
    interface_for_gloo,
    local_address,
    wait_for_name,
)


def name_service(monkeypatch: pytest.MonkeyPatch, own: list[str]) -> None:
    """This host's own name has these addresses; only loopback addresses can be reached."""
    ask = socket.getaddrinfo

    def answer(host: str, port: int | None, **hints: Any) -> list[Any]:
        if host == socket.gethostname():
            return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, 0)) for address in own]
        if not host.startswith("127."):
            raise OSError("no route")
        return list(ask(host, port, **hints))

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def test_one_node_needs_no_network() -> None:
    assert local_address("no.such.host.invalid", nodes=1) == "127.0.0.1"


def test_a_loopback_route_is_not_taken_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a host's own name 127.0.1.1: asked for itself, a host must look further."""
    name_service(monkeypatch, ["127.0.1.1", "::1", "10.1.2.3"])
    assert local_address("127.0.1.1", nodes=2) == "10.1.2.3"


def test_a_name_service_that_is_away_for_a_moment_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At once the run failed three times within half a minute, and was STALLED."""
    now = [0.0]

    def answer(host: str, port: int | None, **hints: Any) -> list[Any]:
        if now[0] < 60:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    wait_for_name("n1", 120.0, clock=lambda: now[0], sleep=sleep)
    assert 60 <= now[0] < 70
    assert capfd.readouterr().err.count("n1 does not resolve on") == 1
    now[0] = 0.0
    with pytest.raises(AddressError, match=r"the first node, n1, did not resolve on \S+ within 30 s: .*resolution"):
        wait_for_name("n1", 30.0, clock=lambda: now[0], sleep=sleep)


def test_no_address_at_all_is_an_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    name_service(monkeypatch, ["127.0.1.1"])
    with pytest.raises(AddressError, match=r"network\.socket_ifname"):
        local_address("127.0.0.1", nodes=2)


def test_the_interface_that_the_job_names_decides() -> None:
    assert interface_address("=lo") == "127.0.0.1"
    assert interface_address("l") == "127.0.0.1"  # NCCL takes the beginning of a name
    assert interface_address("=l") is None
    assert interface_address("^lo") is None


@pytest.mark.parametrize(
    ("own", "interface"),
    [(["127.0.1.1"], "eth0"), (["127.0.1.1", "10.1.2.3"], "eth0"), ([], "eth0"), (["0.0.0.0"], None)],
)
def test_gloo_is_told_of_an_interface_where_the_hosts_own_name_leads_to_loopback(
    monkeypatch: pytest.MonkeyPatch, own: list[str], interface: str | None
) -> None:
    addresses = {b"lo": "127.0.0.1", b"eth0": "10.1.2.3"}

    def ioctl(_descriptor: int, _request: int, asked: bytes) -> bytes:
        return bytes(20) + socket.inet_aton(addresses[asked.rstrip(b"\0")]) + bytes(232)

    name_service(monkeypatch, own)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert interface_for_gloo("10.1.2.3") == interface
    assert interface_for_gloo("127.0.0.1") is None, "a run of one node stays on loopback"
