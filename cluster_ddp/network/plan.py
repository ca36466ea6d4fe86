"""Resolves `network:` of the job file into variables to export, the process-group timeout, and remarks for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.network.profiles import PROFILES
from cluster_ddp.network.variables import (
    LEVEL_VARIABLES,
    LEVELS,
    MAX_SOCKET_THREADS,
    MAX_SOCKETS,
    RENAMED,
    WITHOUT_EFFECT,
)

if TYPE_CHECKING:
    from cluster_ddp.job import NetworkSpec

DEFAULT_TIMEOUT = 1800  # seconds
_DEFAULT_DEBUG = "warn"
_DEBUG: dict[str, dict[str, str]] = {
    "off": {},
    "warn": {"NCCL_DEBUG": "WARN"},
    "info": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET"},
    "detail": {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "ALL",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TORCH_CPP_LOG_LEVEL": "INFO",
    },
}


class NetworkError(ClusterDDPError):
    """A network setting that would be ignored or do harm on the nodes."""


@dataclass(frozen=True)
class Setting:
    """One variable to export, and why."""

    name: str
    value: str
    why: str
    explicit: bool = False  # set in the job file, so it overrides an exported variable; a default does not

    def beats(self, exported: Mapping[str, str]) -> bool:
        """Whether to set it given these exported variables, of which an empty one counts as not set."""
        return self.explicit or not exported.get(self.name)


@dataclass(frozen=True)
class NetworkPlan:
    """The result of resolving the job file's `network:`."""

    settings: tuple[Setting, ...]  # the variables to export, in the order of the script
    timeout: int  # seconds that a collective may take: the process-group timeout
    remarks: tuple[str, ...]  # remarks for the user about how the settings were read

    @property
    def variables(self) -> dict[str, str]:
        """The variables to export, by name."""
        return {setting.name: setting.value for setting in self.settings}


def resolve(network: NetworkSpec, exported: Mapping[str, str] | None = None) -> NetworkPlan:
    """Determine the variables: the profile's defaults, overridden by exported variables, the keys, and `env`, in order.

    Parameters
    ----------
    exported
        The environment that the variables will be added to, if known. Exported variables that win are not among the
        settings.

    Raises
    ------
    NetworkError
        A value that NCCL would silently ignore or refuse.
    """
    chosen: dict[str, Setting] = {}
    remarks: list[str] = []
    for name, default in PROFILES[network.profile].items():
        why = f"profile {network.profile}: {default.why}"
        chosen[name] = Setting(name, default.value, why, explicit=False)
    _apply_keys(network, chosen, remarks)
    timeout = _apply_env(network, chosen, remarks)
    _check_values({setting.name: setting.value for setting in chosen.values()})
    exported = exported or {}
    if exported.get("NCCL_TIMEOUT"):
        set_by = "network.env" if "NCCL_TIMEOUT" in network.env else "network.timeout" if network.timeout else None
        timeout, remark = _exported_timeout(exported["NCCL_TIMEOUT"], timeout, set_by)
        remarks.append(remark)
    remarks += [said for setting in chosen.values() if (said := _said_once(setting, exported))]
    return NetworkPlan(
        tuple(setting for setting in chosen.values() if setting.beats(exported)), timeout, tuple(remarks)
    )


def _apply_keys(network: NetworkSpec, chosen: dict[str, Setting], remarks: list[str]) -> None:
    """Set the variables of the keys of `network:`, other than `env`."""

    def put(name: str, value: str, why: str, *, explicit: bool = True) -> None:
        chosen[name] = Setting(name, value, why, explicit)

    if network.ib_disable is not None:
        put("NCCL_IB_DISABLE", "1" if network.ib_disable else "0", "network.ib_disable")
    if network.socket_ifname:
        put("NCCL_SOCKET_IFNAME", network.socket_ifname, "network.socket_ifname")
        for_gloo = _gloo_interfaces(network.socket_ifname)
        if for_gloo:
            put("GLOO_SOCKET_IFNAME", for_gloo, "network.socket_ifname (Gloo has its own variable)")
        else:
            remarks.append(
                f"network.socket_ifname: Gloo cannot exclude interfaces as {network.socket_ifname} does for NCCL; "
                "set GLOO_SOCKET_IFNAME in network.env if Gloo picks a wrong one."
            )
    for name, value in _DEBUG[network.debug or _DEFAULT_DEBUG].items():
        why = f"network.debug: {network.debug}" if network.debug else f"the default of network.debug: {_DEFAULT_DEBUG}"
        put(name, value, why, explicit=network.debug is not None)


def _apply_env(network: NetworkSpec, chosen: dict[str, Setting], remarks: list[str]) -> int:
    """Set the variables of `network.env`; return the process-group timeout, which NCCL_TIMEOUT there may set."""
    timeout = int(network.timeout or DEFAULT_TIMEOUT)
    for name, value in network.env.items():
        if name == "NCCL_TIMEOUT":
            if (seconds := _seconds(value)) is None:
                raise NetworkError(
                    f"network.env.NCCL_TIMEOUT: {value!r} is not a number of seconds. Set network.timeout instead, "
                    "such as 30m."
                )
            timeout = seconds
            remarks.append(f"network.env.NCCL_TIMEOUT: {_as_timeout(seconds)}")
        elif name in WITHOUT_EFFECT:
            remarks.append(f"network.env.{name} has no effect: {WITHOUT_EFFECT[name]}. It is omitted.")
        elif name in RENAMED:
            renamed = RENAMED[name]
            remarks.append(f"network.env.{name} is torch's and called {renamed} now; exported under that name.")
            chosen[renamed] = Setting(renamed, value, f"network.env.{name}", explicit=True)
        else:
            chosen[name] = Setting(name, value, "network.env", explicit=True)
    return timeout


def _said_once(setting: Setting, exported: Mapping[str, str]) -> str | None:
    """A remark on which value counts, if the job and the user's environment differ."""
    value = exported.get(setting.name)
    if not value or value == setting.value:
        return None
    if setting.explicit:
        return f"{setting.name}={value} is exported, but the job's {setting.value} takes precedence ({setting.why})."
    return f"{setting.name}={value} is exported and takes precedence over {setting.value} ({setting.why})."


def _exported_timeout(value: str, timeout: int, set_by: str | None) -> tuple[int, str]:
    """The process-group timeout if NCCL_TIMEOUT is exported, and a remark on it."""
    if set_by is not None:
        return (
            timeout,
            f"NCCL_TIMEOUT={value} is exported, but {set_by} sets the timeout to {timeout} s, which takes precedence.",
        )
    if (seconds := _seconds(value)) is None:
        return timeout, f"NCCL_TIMEOUT={value} is exported, but is not a number of seconds: the timeout is {timeout} s."
    return seconds, f"NCCL_TIMEOUT={value} is exported: {_as_timeout(seconds)}"


def _gloo_interfaces(nccl: str) -> str:
    """NCCL's interfaces for Gloo, which always matches exactly (``=eth0``) and cannot exclude any (``^docker``)."""
    return "" if nccl.startswith("^") else nccl.removeprefix("=")


def _seconds(value: str) -> int | None:
    return int(value) if _is_number(value.strip()) and int(value) else None


def _as_timeout(seconds: int) -> str:
    return (
        f"NCCL has no such variable. Its {seconds} s became the process-group timeout, which is what was meant; write "
        f"it as network.timeout: {seconds}s."
    )


def _check_values(variables: dict[str, str]) -> None:
    for name in sorted(LEVEL_VARIABLES & variables.keys()):
        value = variables[name]
        if value not in LEVELS and not _is_number(value):
            raise NetworkError(
                f"network.env.{name}: {value!r} is not a level, and NCCL would ignore it.\n"
                f"    allowed: {', '.join(LEVELS)}, or a digit"
            )
    threads = _number(variables, "NCCL_SOCKET_NTHREADS", 1)
    sockets = _number(variables, "NCCL_NSOCKS_PERTHREAD", 1)
    if threads > MAX_SOCKET_THREADS:
        raise NetworkError(f"network.env.NCCL_SOCKET_NTHREADS: {threads} is more than NCCL's {MAX_SOCKET_THREADS}.")
    if threads * sockets > MAX_SOCKETS:
        raise NetworkError(
            f"network.env: NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD is {threads} x {sockets} = "
            f"{threads * sockets}; NCCL takes at most {MAX_SOCKETS}."
        )


def _number(variables: dict[str, str], name: str, default: int) -> int:
    value = variables.get(name, str(default))
    if not _is_number(value):
        raise NetworkError(f"network.env.{name}: {value!r} is not a number.")
    return int(value)


def _is_number(value: str) -> bool:
    return value.isascii() and value.isdigit()
