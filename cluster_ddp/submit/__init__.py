"""The ways to start a run: sbatch and submitit behind one small interface (ways.py), local, going on (resume.py)."""
