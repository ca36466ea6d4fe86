"""The ways to start a run, as named in its record (`RunRecord.via`); the code of each is in `submit/`."""

SBATCH = "sbatch"
SUBMITIT = "submitit"
LOCAL = "local"  # on one machine
LAUNCH = "launch"  # by the same command on each of several machines

QUEUED = {SBATCH: "slurm-{job}.out", SUBMITIT: "submitit/{job}_0_log.out"}
"""The ways that go through a batch system, each with the file of the run directory that has a job's output."""
