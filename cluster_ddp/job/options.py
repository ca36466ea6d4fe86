"""``slurm.extra``: sbatch options that have no key of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import PlainValidator

from cluster_ddp.job.fields import contradiction, line, refused
from cluster_ddp.job.units import parse_slurm_time

Option = str | int | float | bool | None

_OPTION = r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*"
_OWN_KEYS = {
    "job-name": "name",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "nodes": "slurm.nodes",
    "gpus": "slurm.gpus_per_node",
    "gpus-per-node": "slurm.gpus_per_node",
    "gpus-per-task": "slurm.gpus_per_node",
    "cpus-per-task": "slurm.cpus_per_task",
    "mem": "slurm.mem",
    "time": "slurm.time",
    "constraint": "slurm.constraint",
    "exclude": "slurm.exclude",
    "nodelist": "slurm.nodelist",
    "reservation": "slurm.reservation",
    "signal": "requeue.signal and requeue.warning",
    "requeue": "requeue.max_requeues",
    "no-requeue": "requeue.max_requeues: 0",
    "export": "network.env",
    "export-file": "network.env",
    "dependency": "the option --after of submit",
}
_RENDERED = {
    "array": "one run is one job; to vary settings use cluster-ddp sweep",
    "clusters": "status and other commands query the cluster of this login node: submit from a login node of that "
    "cluster, or export SLURM_CLUSTERS for all of them",
    "output": "the output goes to the run directory",
    "error": "the output goes to the run directory",
    "no-kill": "a job that loses a node has to end, so that Slurm starts it again",
    "open-mode": "requeued attempts have to append to the output",
    "parsable": "cluster-ddp reads the output of sbatch",
    "test-only": "use submit --dry-run",
    "wrap": "the script is rendered from the job file",
    "wait": "use status --watch",
}
_CHECKED = ("ntasks", "tasks-per-node", "gres", "comment")
_EXCLUDES = {"mem-per-cpu": "mem", "mem-per-gpu": "mem", "cpus-per-gpu": "cpus_per_task"}


def _options(value: object) -> dict[str, Option]:
    allowed = "a mapping of sbatch options to their values, such as {mail-type: END, exclusive: true}"
    if not isinstance(value, Mapping):
        raise refused("is not a mapping", allowed=allowed)
    return {name: _option(name, setting) for name, setting in value.items()}


def _option(name: object, setting: object) -> Option:
    at = (str(name),)
    if not isinstance(name, str) or not re.fullmatch(_OPTION, name):
        spelt = str(name).strip("-").replace("_", "-").lower()
        hint = f"write {spelt}" if re.fullmatch(_OPTION, spelt) else "an option as sbatch(1) names it"
        raise refused("is not a long option of sbatch without its dashes", allowed=hint, at=at)
    if name == "requeue" and setting == "expedite":  # Slurm 25.11 and later, if the site allows it
        return setting
    if name in _OWN_KEYS:
        shown = not name.startswith("export")  # the exported values may be secret
        raise refused("cannot be set here", allowed=f"use {_OWN_KEYS[name]} instead", at=at, show=shown)
    if name in _RENDERED:
        raise refused("cannot be set here", allowed=_RENDERED[name], at=at)
    if "ntasks" in name or name == "tasks-per-node":
        raise refused(
            "cannot be set here", allowed="one task per node starts the ranks: use launch.procs_per_node", at=at
        )
    if name == "gres" and any(kind.startswith("gpu") for kind in str(setting).split(",")):
        raise refused("cannot be set here", allowed="use slurm.gpus_per_node with gpu_option: gres", at=at)
    if setting is None or isinstance(setting, (bool, int, float)):
        return setting
    if not isinstance(setting, str):
        raise refused("is not a valid option value", allowed="a string, a number, true, false or nothing", at=at)
    try:
        return line(setting)
    except ValueError as error:
        raise refused("is not one line", allowed="a string of one line", at=at) from error


def meant_by(name: str) -> str | None:
    """Return the option that must not be set here and that sbatch takes `name` for, as it accepts abbreviations."""
    checked = (*_OWN_KEYS, *_RENDERED, *_CHECKED)
    return None if name in checked else min((option for option in checked if option.startswith(name)), default=None)


def time_min(extra: Mapping[str, Option]) -> int | None:
    """Return the seconds to which Slurm may shorten the time limit; None if it may not, or sbatch has to judge."""
    value = extra.get("time-min")
    try:
        return parse_slurm_time(str(value))
    except ValueError:
        return None


def check_against_keys(extra: Mapping[str, Option], *, mem: str | None, cpus_per_task: int | None) -> None:
    """Refuse options that Slurm does not accept together with a key that is set."""
    settings = {"mem": mem, "cpus_per_task": cpus_per_task}
    for option, key in _EXCLUDES.items():
        if option in extra and settings[key] is not None:
            raise contradiction(
                f"Slurm does not accept --{option} together with slurm.{key}",
                at=f"extra.{option}",
                instead="one of the two",
            )


Options = Annotated[dict[str, Option], PlainValidator(_options)]
