"""Slurm itself: its commands, node lists, job states, and what it says about a job. Knows nothing of runs.

commands, control, environment     calling Slurm's commands
states, job_info, shown            what they say about a job
partitions                         the limits of partitions, and their nodes
nodelist, start                    on a node: the hosts of the job, and which start of which job this is
"""
