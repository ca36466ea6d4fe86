"""The ways to start a run: sbatch, submitit, local, manual. One file each behind one small interface."""
