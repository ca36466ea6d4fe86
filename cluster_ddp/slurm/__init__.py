"""Everything that speaks Slurm: node lists, rendering the batch script, calling its commands, its states."""
