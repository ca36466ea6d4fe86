"""Turns `network:` in the job file into environment variables for NCCL, Gloo and torch, each with its reason.

A new variable needs no code: `network.env` accepts any. Checks for it go into variables.py, a default for a kind of
network into profiles.py, a job file key for it into job/models.py and plan.py.
"""

from cluster_ddp.network.plan import DEFAULT_TIMEOUT, NetworkError, NetworkPlan, Setting, resolve

__all__ = ["DEFAULT_TIMEOUT", "NetworkError", "NetworkPlan", "Setting", "resolve"]
