"""Slurm itself: its commands, node lists, job states, and what it says about a job. Knows nothing of runs."""
