from __future__ import annotations

import socket

import pytest

from cluster_ddp.launch import address


def test_one_node_needs_no_network() -> None:
    assert address.local_address("no.such.host.invalid", nodes=1) == "127.0.0.1"


def test_a_loopback_route_is_not_taken_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a host's own name 127.0.1.1: asked for itself, a host must look further."""
    monkeypatch.setattr(address, "_own_names", lambda: ["127.0.1.1", "::1", "10.1.2.3"])
    assert address.local_address("127.0.1.1", nodes=2) == "10.1.2.3"


def test_no_address_at_all_is_an_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_own_names", lambda: ["127.0.1.1"])
    monkeypatch.setattr(address, "_route_to", lambda host: None)
    with pytest.raises(address.AddressError, match=r"network\.socket_ifname"):
        address.local_address("127.0.0.1", nodes=2)


def test_the_interface_that_the_job_names_decides() -> None:
    assert address._interface_address("=lo") == "127.0.0.1"
    assert address._interface_address("l") == "127.0.0.1"  # NCCL takes the beginning of a name
    assert address._interface_address("=l") is None
    assert address._interface_address("^lo") is None


def test_free_ports_are_below_the_ephemeral_ones_and_really_free(monkeypatch: pytest.MonkeyPatch) -> None:
    port = address.free_port()
    assert 20000 <= port < 32768
    with socket.create_server(("127.0.0.1", port)):
        order = iter([[port, port + 1]])
        monkeypatch.setattr(address.random, "sample", lambda *_: next(order))
        assert address.free_port() == port + 1


def test_ipv6_stands_in_brackets() -> None:
    assert address.bracketed("fe80::1") == "[fe80::1]"
    assert address.bracketed("10.0.0.1") == "10.0.0.1"
