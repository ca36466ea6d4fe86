"""The network environment of NCCL, Gloo and torch: from `network:` in the job file to variables with reasons."""

from cluster_ddp.network.plan import NetworkError, NetworkPlan, Setting, resolve

__all__ = ["NetworkError", "NetworkPlan", "Setting", "resolve"]
