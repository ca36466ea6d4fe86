"""What a job asks Slurm about itself, and has it do, with stand-ins that answer as Slurm 22.05 does."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_stand_ins import calls, stand_in

from cluster_ddp.slurm import control
from cluster_ddp.slurm.commands import SlurmError, SlurmRefused
from cluster_ddp.slurm.control import (
    closed_hosts,
    down_nodes,
    exclude_hosts,
    hides_jobs_of_others,
    kill_wait,
    requeue_job,
    show_job,
    usable_nodes,
)
from cluster_ddp.slurm.start import SlurmStart

pytestmark = pytest.mark.usefixtures("slurm")
START = SlurmStart("7", "7", restart_count=0, nodes=1, node_list="n1", partition="p", batch_host="n1")


def test_kill_wait(slurm: Path) -> None:
    assert kill_wait(seconds=5) is None, "where Slurm cannot be queried"
    stand_in(slurm, "scontrol", "printf 'KillOnBadExit           = 0\\nKillWait                = 5 sec\\n'")
    assert kill_wait(seconds=5) == 5.0


def test_a_job_of_which_slurm_says_nothing(slurm: Path) -> None:
    assert show_job("7", seconds=5) is None
    stand_in(slurm, "scontrol", "exit 1")
    assert show_job("7", seconds=5) is None


@pytest.mark.parametrize(
    ("known", "hosts", "excluded"),
    [("(null)", "", "b,d"), ("old[1-2]", "old1\nold2", "old[1-2],b,d"), ("[a-b]", "a\nb", "[a-b],d")],
)
def test_hosts_are_excluded_besides_those_that_were(slurm: Path, known: str, hosts: str, excluded: str) -> None:
    stand_in(
        slurm,
        "scontrol",
        f"[[ $2 == job ]] && echo 'JobId=7 JobState=RUNNING Restarts=0 ExcNodeList={known} NodeList=a'\n"
        f"[[ $2-$3 == hostnames-'{known}' ]] && echo '{hosts}'\ntrue",
    )
    exclude_hosts("7", ["b", "d"])
    assert calls(slurm)[-1] == f"scontrol update JobId=7 ExcNodeList={excluded}"


@pytest.mark.parametrize(("known", "hosts"), [("(null)", []), ("[c-d]", ["c", "d"])])
def test_hosts_that_a_job_is_kept_from(slurm: Path, known: str, hosts: list[str]) -> None:
    stand_in(
        slurm,
        "scontrol",
        f"[[ $2 == job ]] && echo 'JobId=7 JobState=RUNNING Restarts=0 ExcNodeList={known} X=y'\n"
        "[[ $2-$3 == hostnames-'[c-d]' ]] && printf 'c\nd\n'\ntrue",
    )
    assert closed_hosts(START) == hosts


@pytest.mark.parametrize(
    ("asked", "closed"),
    [
        ("Features=(null)", ["old"]),
        ("Features=a100&nvlink", ["old", "v1", "b1"]),
        ("Features=a100|v100", ["old", "v1", "b1"]),
        ("Features=(null) TresPerNode=gres:gpu:4", ["old", "s1"]),
        ("Features=[rack1*2] TresPerNode=gres/gpu:a100:4", ["old", "v1", "s1"]),
        ("MinCPUsNode=64 MinMemoryNode=0 Features=(null)", ["old"]),
        ("MinCPUsNode=65 MinMemoryNode=0 Features=(null)", ["old", "v1"]),
        ("MinCPUsNode=1 MinMemoryNode=250.50G Features=(null)", ["old", "b1"]),
        ("MinCPUsNode=65 MinMemoryCPU=4000M Features=(null)", ["old", "v1", "b1"]),
    ],
)
def test_hosts_that_lack_what_a_job_asks_for_are_closed_to_it(slurm: Path, asked: str, closed: list[str]) -> None:
    """They are no others to go to, when a bad one of the job's own is left: it would never start again."""
    shown = f"JobId=7 JobState=RUNNING Restarts=0 ExcNodeList=old {asked} X=y"
    stand_in(slurm, "scontrol", f"[[ $2 == job ]] && echo '{shown}'\ntrue")
    nodes = (
        "n1|a100,nvlink,rack1|gpu:a100:4(S:0-1)|128|512000", "n2|a100,nvlink,rack1|gpu:a100:4(S:0-1)|128|512000",
        "n3|a100,nvlink,rack1|gpu:a100:4(S:0)|128|512000", "v1|v100,rack2|gpu:a100:4|64|512000",
        "b1|rack1|gpu:a100:4(S:0-1)|128|256000", "s1|a100,nvlink,rack1|gpu:a100:2|128|512000",
    )  # fmt: skip
    stand_in(slurm, "sinfo", "echo 'Welcome!'\n" + "\n".join(f"echo '{node}'" for node in nodes))
    start = replace(START, node_list="n[1-2]", nodes=2)
    assert closed_hosts(start) == closed


@pytest.mark.parametrize(
    ("asked", "closed"),
    [
        ("", ["n5", "n6"]),
        (" MinCPUsNode=2", ["n5", "n6"]),
        (" Reservation=mine", ["n4", "n5", "n6", "n7"]),
        (" Reservation=mine,later", ["n4", "n5", "n6"]),
    ],
)
def test_reserved_hosts_are_no_others_to_go_to(slurm: Path, asked: str, closed: list[str]) -> None:
    """Nor are those outside of a job's own reservation: sinfo calls all of them idle."""
    reservations = (
        "ReservationName=mine StartTime=x Nodes=n[1-3] NodeCnt=3 State=ACTIVE BurstBuffer=(null)",
        "ReservationName=theirs StartTime=x Nodes=n[5-6] NodeCnt=2 State=ACTIVE BurstBuffer=(null)",
        "ReservationName=later StartTime=x Nodes=n7 NodeCnt=1 State=INACTIVE BurstBuffer=(null)",
        "ReservationName=licenses StartTime=x Nodes=(null) NodeCnt=0 State=ACTIVE BurstBuffer=(null)",
    )
    if not asked.startswith(" Reservation"):
        reservations = reservations[1:]
    shown = f"JobId=7 JobState=RUNNING Restarts=0 ExcNodeList=(null) Features=(null){asked}"
    lines = " ".join(f"'{line}'" for line in reservations)
    stand_in(
        slurm,
        "scontrol",
        f"[[ $2 == job ]] && echo '{shown}'\n[[ $2 == reservation ]] && printf '%s\\n' {lines}\ntrue",
    )
    stand_in(slurm, "sinfo", "printf 'n%s|(null)|(null)|64|512000\\n' 1 2 3 4 5 6 7")
    assert sorted(closed_hosts(replace(START, node_list="n[1-2]", nodes=2))) == closed


def test_a_greeting_of_scontrol_is_no_host(slurm: Path) -> None:
    job = "JobId=7 JobState=RUNNING Restarts=0 ExcNodeList=c[1-2] X=y"
    stand_in(slurm, "scontrol", f"echo 'Welcome to the cluster!'; [[ $2 == job ]] && echo '{job}'\ntrue")
    assert closed_hosts(START) == ["c1", "c2"]


def test_a_node_in_two_states_is_one(slurm: Path) -> None:
    stand_in(slurm, "sinfo", "printf 'a\nb\nc\nc\n'")
    assert usable_nodes("p") == {"a", "b", "c"}
    assert "--partition=p" in calls(slurm)[0]


def test_nodes_that_are_down_are_of_those_asked_about(slurm: Path) -> None:
    stand_in(slurm, "sinfo", "printf 'n2\nn7\n'")
    assert down_nodes(["n1", "n2"]) == ["n2"]
    assert "--all " in calls(slurm)[0], "sinfo leaves out nodes that are only in hidden partitions"
    stand_in(slurm, "sinfo", "exit 1")
    assert down_nodes(["n1", "n2"]) == []


def test_whether_people_see_only_their_own_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for private, hides in (("none", False), ("nodes,users", False), ("accounts,jobs", True), ("ALL", True)):
        monkeypatch.setattr(control, "configuration", lambda shown=private: f"PrivateData             = {shown}\n")
        assert hides_jobs_of_others() == hides


def test_a_requeue_is_asked_for_once_and_a_refusal_has_slurms_words(slurm: Path) -> None:
    stand_in(slurm, "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmError, match="Unable to contact"):
        requeue_job("70_4", "gpu")
    assert calls(slurm) == ["scontrol requeue 70_4"]


@pytest.mark.parametrize(
    "words",
    [
        "Unable to contact slurm controller (connect failure)",
        'Munge encode failed: Failed to access "/run/munge/munge.socket.2"\nslurm_requeue error: Protocol '
        "authentication error",
        "fatal: Could not establish a configuration source",
    ],
)
def test_what_keeps_the_controller_from_being_reached_is_no_refusal(slurm: Path, words: str) -> None:
    """A requeue is given up after a few refusals, but tried for as long as it takes where nobody has said no."""
    stand_in(slurm, "scontrol", f"echo {shlex.quote(words)} >&2; exit 1")
    with pytest.raises(SlurmError) as raised:
        requeue_job("77", "gpu")
    assert not isinstance(raised.value, SlurmRefused)


def test_a_refusal_is_one(slurm: Path) -> None:
    stand_in(slurm, "scontrol", "echo 'Requested operation is presently disabled for job 77' >&2; exit 1")
    with pytest.raises(SlurmRefused):
        requeue_job("77", "gpu")


def test_a_requeue_into_a_partition_that_was_removed_is_refused_for_that_reason(slurm: Path) -> None:
    refuses = "echo 'Requested operation is presently disabled for job 77' >&2; exit 1"
    stand_in(slurm, "scontrol", f'[ "$1" = show ] && echo "Partition gpu not found" >&2 && exit 1\n{refuses}')
    with pytest.raises(SlurmRefused, match=r"its partition was removed \(sinfo -s lists what exists\): gpu"):
        requeue_job("77", "gpu")
