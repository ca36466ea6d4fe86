"""The network environment of NCCL, Gloo and torch: from the job file's `network:` to variables, each with its reason."""

from cluster_ddp.network.plan import NetworkError, NetworkPlan, Setting, resolve

__all__ = ["NetworkError", "NetworkPlan", "Setting", "resolve"]
