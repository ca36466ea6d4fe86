"""Slurm's reasons for a job's wait, in words."""

from __future__ import annotations

import pytest

from cluster_ddp.run.status.waiting import in_words


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxNodePerUserLimit", "the QOS limits the nodes of one user"),
        ("QOSMaxCpuPerJobLimit", "does not start: it asks for more CPUs than the QOS allows for one job"),
        ("QOSMaxWallDurationPerJobLimit", "does not start: it asks for more time than the QOS allows for one job"),
        ("QOSGrpNodeLimit", "the QOS limits the nodes of all its jobs together"),
        ("QOSMaxGRESPerUser", "the QOS limits the GPUs or other resources of one user"),
        ("AssocGrpCPUMinutesLimit", "the account limits the CPU time of all its jobs together"),
        ("AssocMaxJobsLimit", "the account limits the jobs of one user"),
        ("DependencyNeverSatisfied", "never starts"),
        ("BadConstraints", "never starts: no node outside its exclude list meets the request"),
        ("PartitionConfig", "does not start: this user may not use its partition"),
        ("BeginTime", "not before its begin time"),
        ("InvalidQOS", "does not start: its QOS was removed"),
        ("JobArrayTaskLimit", "waits for other jobs of its array"),
        ("PartitionDown", "its partition is not starting jobs now (sinfo -s)"),
        ("PartitionInactive", "its partition is closed"),
        ("ReqNodeNotAvail, UnavailableNodes:n7", "nodes that it needs are down, drained or reserved"),
        ("ReservationDeleted", "does not start: its reservation was deleted"),
        ("Licenses", "waits for a license"),
        ("QOSMinGRES", "does not start: the QOS requires a job to ask for more GPUs or other resources"),
        ("QOSMinCpuNotSatisfied", "does not start: the QOS requires a job to ask for more CPUs"),
        ("MaxGRESPerAccount", "the QOS limits the GPUs or other resources of one account"),
    ],
)
def test_what_a_reason_means(reason: str, words: str) -> None:
    said = in_words(reason)
    assert said is not None
    assert said.startswith(words)
    assert said.endswith(f"({reason})")


def test_other_reasons_stay_as_they_are() -> None:
    assert in_words("None") is None
    assert in_words("NvidiaImexChannels") == "NvidiaImexChannels"
