"""Slurm as it is: its commands, node lists, job states, and what it says about a job. Nothing of ours is known here."""
