"""The public names of `cluster_ddp.submit`."""

# mypy: implicit-reexport
# ruff: noqa: F401

from cluster_ddp.submit.handle import RunFailed, RunHandle, submit
