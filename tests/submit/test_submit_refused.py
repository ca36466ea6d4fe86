"""What is said where Slurm refuses a job."""

from __future__ import annotations

import pytest

from cluster_ddp.slurm.commands import SlurmRefused
from cluster_ddp.submit.refused import advised

BOTH_WAYS = "sbatch: fatal: --gpus-per-node and --gres=gpu are mutually exclusive."
POLICY = (
    "sbatch: error: AssocMaxSubmitJobLimit Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        # Slurm 26.05 refuses them; a job file asks in one way, so the other one comes from the shell.
        pytest.param(BOTH_WAYS, "unset SBATCH_GRES SBATCH_GPUS_PER_NODE", id="GPUs asked for in both ways"),
        pytest.param(POLICY, "a limit on jobs in the queue", id="a limit on queued jobs, not on time"),
        pytest.param("Invalid qos specification", "slurm.qos: to list yours", id="a QOS"),
    ],
)
def test_a_refusal_says_what_to_do(said: str, advice: str) -> None:
    with pytest.raises(SlurmRefused, match=advice) as caught, advised():
        raise SlurmRefused(said)
    assert str(caught.value).startswith(f"{said}\nWhat to do: ")


def test_an_unknown_refusal_stays_as_it_is() -> None:
    with pytest.raises(SlurmRefused, match=r"^no pizza$"), advised():
        raise SlurmRefused("no pizza")
