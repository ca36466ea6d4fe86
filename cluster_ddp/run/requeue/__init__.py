"""What follows an attempt, or a start of the job that began none: above all, whether Slurm is to requeue the job.

decision           after an attempt: `decide` goes by the run's records and the limits of its job file. The keeper asks
                   it (launch/keeper/deciding); if the keeper was killed, the next start asks `decide_late`. Without an
                   attempt, the keeper requeues a job that was given bad hosts, or whose storage does not respond
start_failed.sh    after a start that failed before its keeper ran, perhaps because Python does not start on the host.
                   job.sbatch calls it; without a run directory, a job requeues itself a few times (submit/preamble.py)
"""
