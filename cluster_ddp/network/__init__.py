"""The network environment of NCCL, Gloo and torch: from `network:` in the job file to variables with reasons.

A new variable needs no code: `network.env` takes any. What is known about it goes into variables.py, a default for a
kind of network into profiles.py, a key of its own into job/models.py and plan.py.
"""

from cluster_ddp.network.plan import DEFAULT_TIMEOUT, NetworkError, NetworkPlan, Setting, resolve

__all__ = ["DEFAULT_TIMEOUT", "NetworkError", "NetworkPlan", "Setting", "resolve"]
