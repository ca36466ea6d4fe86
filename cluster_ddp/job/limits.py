"""How much there may be of something, for those who load neither pydantic nor YAML."""

MAX_ELEMENTS = 10_000  # of a sweep: Slurm's own limit of jobs, where a site sets no other
