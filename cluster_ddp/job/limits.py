"""Limits that are needed where neither pydantic nor YAML is loaded."""

MAX_ELEMENTS = 10_000  # of a sweep: Slurm's own limit of jobs, where a site sets no other
