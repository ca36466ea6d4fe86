from __future__ import annotations

import random
import socket

import pytest

from cluster_ddp.launch.ports import NoFreePort, attempt_port, free_port, job_port


def test_programs_that_are_seeded_alike_get_different_ports_and_keep_their_numbers() -> None:
    ports = set()
    for _ in range(3):
        random.seed(1)
        before = random.getstate()
        ports.add(free_port())
        assert random.getstate() == before
    assert len(ports) > 1


def test_free_ports_are_below_the_ephemeral_ones_and_really_free(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    assert 20000 <= port < 32768
    with socket.create_server(("127.0.0.1", port)):
        order = iter([[port, port + 1], [port]])
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: next(order))
        assert free_port() == port + 1
        with pytest.raises(NoFreePort, match=r"on 127\.0\.0\.1"):
            free_port()


@pytest.mark.parametrize(("job", "port"), [(0, 20000), (1, 20001), (12767, 32767), (12768, 20000)])
def test_the_port_of_a_job_is_below_the_ephemeral_ones(job: int, port: int) -> None:
    assert job_port(job) == port


def test_each_attempt_has_a_port_of_its_own_that_nobody_listens_on() -> None:
    first = attempt_port(77, 0)
    assert len({attempt_port(77, number) for number in range(5)}) == 5
    with socket.create_server(("", first)):
        other = attempt_port(77, 0)
    assert other != first
    assert 20000 <= other < 32768
