"""Turns `network:` in the job file into environment variables for NCCL, Gloo and torch, each with its reason.

A new variable needs no code: `network.env` accepts any. What is known about one goes into variables.py, checks of its
values into plan.py, a default for a kind of network into profiles.py, a key of the job file into job/models.py and
`_apply_keys` in plan.py.
"""

from cluster_ddp.network.plan import DEFAULT_TIMEOUT, NetworkError, NetworkPlan, Setting, resolve

__all__ = ["DEFAULT_TIMEOUT", "NetworkError", "NetworkPlan", "Setting", "resolve"]
