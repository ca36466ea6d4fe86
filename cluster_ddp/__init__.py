"""Take a PyTorch DDP training job from a login node to the end of training on a Slurm cluster."""

__version__ = "0.1.0"
