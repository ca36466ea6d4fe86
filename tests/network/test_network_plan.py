"""From `network:` to variables: profiles, precedence, translations, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cluster_ddp.job import NetworkSpec
from cluster_ddp.network import NetworkError, NetworkPlan, resolve
from cluster_ddp.network.profiles import PROFILES
from cluster_ddp.network.variables import LEVELS


def plan(**network: Any) -> NetworkPlan:
    return resolve(NetworkSpec.model_validate({"debug": "off", **network}))


def test_every_profile_of_the_job_file_exists() -> None:
    for profile in ("auto", "ethernet", "infiniband", "roce"):
        assert plan(profile=profile).variables == {name: default.value for name, default in PROFILES[profile].items()}


def test_auto_sets_nothing_that_was_not_asked_for() -> None:
    assert plan(profile="auto").variables == {}


def test_keys_beat_the_profile_and_env_beats_both() -> None:
    assert plan(profile="ethernet").variables["NCCL_IB_DISABLE"] == "1"
    assert plan(profile="ethernet", ib_disable=False).variables["NCCL_IB_DISABLE"] == "0"
    env = {"NCCL_IB_DISABLE": "1"}
    assert plan(profile="infiniband", ib_disable=False, env=env).variables["NCCL_IB_DISABLE"] == "1"


def test_every_setting_has_a_reason() -> None:
    settings = plan(profile="ethernet", socket_ifname="eth0", debug="info", env={"A": "b"}).settings
    assert all(setting.why for setting in settings)
    assert next(setting for setting in settings if setting.name == "A").why == "network.env"


@pytest.mark.parametrize(("ifname", "gloo"), [("eth0", "eth0"), ("=eth0", "eth0"), ("eth0,eth1", "eth0,eth1")])
def test_the_interface_is_set_for_gloo_too(ifname: str, gloo: str) -> None:
    variables = plan(socket_ifname=ifname).variables
    assert variables["NCCL_SOCKET_IFNAME"] == ifname
    assert variables["GLOO_SOCKET_IFNAME"] == gloo


def test_gloo_cannot_exclude_interfaces() -> None:
    excluded = plan(socket_ifname="^docker0")
    assert "GLOO_SOCKET_IFNAME" not in excluded.variables
    assert "GLOO_SOCKET_IFNAME" in excluded.remarks[0]


def test_gloos_own_interface_stays() -> None:
    variables = plan(socket_ifname="ib0", env={"GLOO_SOCKET_IFNAME": "eth0"}).variables
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0"


def test_nccl_timeout_becomes_the_process_groups() -> None:
    translated = plan(timeout="10m", env={"NCCL_TIMEOUT": "1800"})
    assert translated.timeout == 1800
    assert "NCCL_TIMEOUT" not in translated.variables
    assert "network.timeout: 1800s" in translated.remarks[0]
    assert plan(timeout="10m").timeout == 600


@pytest.mark.parametrize("value", ["30m", "", "0", "-1", "1e3"])
def test_a_nccl_timeout_that_is_no_number(value: str) -> None:
    with pytest.raises(NetworkError, match="NCCL_TIMEOUT"):
        plan(env={"NCCL_TIMEOUT": value})


def test_torchs_old_names_are_exported_under_the_new() -> None:
    renamed = plan(env={"NCCL_BLOCKING_WAIT": "1", "NCCL_ASYNC_ERROR_HANDLING": "3"})
    assert renamed.variables == {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert len(renamed.remarks) == 2


@pytest.mark.parametrize(
    "name", ["NCCL_TREE_THRESHOLD", "NCCL_LL_THRESHOLD", "NCCL_IB_CUDA_SUPPORT", "NCCL_IB_GDR_LEVEL"]
)
def test_variables_that_nobody_reads_are_left_out_and_said_so(name: str) -> None:
    dropped = plan(env={name: "1"})
    assert dropped.variables == {}
    assert name in dropped.remarks[0]


@pytest.mark.parametrize("name", ["NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"])
def test_levels(name: str) -> None:
    for level in (*LEVELS, "5"):
        assert plan(env={name: level}).variables[name] == level
    for level in ("NVLINK", "nvl", "", "-1"):
        with pytest.raises(NetworkError, match="SYS"):
            plan(env={name: level})


@pytest.mark.parametrize(
    ("threads", "sockets", "fits"),
    [("16", "4", True), ("17", "1", False), ("16", "5", False), ("x", "1", False), ("²", "1", False)],
)
def test_socket_threads(threads: str, sockets: str, fits: bool) -> None:
    env = {"NCCL_SOCKET_NTHREADS": threads, "NCCL_NSOCKS_PERTHREAD": sockets}
    if fits:
        assert plan(env=env).variables == env
    else:
        with pytest.raises(NetworkError, match="NCCL_SOCKET_NTHREADS"):
            plan(env=env)


def test_debug() -> None:
    assert plan(debug="off").variables == {}
    assert plan(debug="warn").variables == {"NCCL_DEBUG": "WARN"}
    assert plan(debug="info").variables["NCCL_DEBUG"] == "INFO"
    assert plan(debug="detail").variables["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"


# -- what a person exported --------------------------------------------------------------------------------------------


def test_an_explicit_key_beats_what_was_exported_and_that_beats_every_default() -> None:
    exported = {"NCCL_DEBUG": "INFO", "NCCL_IB_TIMEOUT": "20", "NCCL_IB_DISABLE": "1", "NCCL_ALGO": "Tree"}
    network = NetworkSpec.model_validate({"profile": "infiniband", "ib_disable": False, "env": {"NCCL_ALGO": "Ring"}})
    found = resolve(network, exported)
    assert {**exported, **found.variables} == {
        "NCCL_DEBUG": "INFO", "NCCL_IB_TIMEOUT": "20", "NCCL_IB_DISABLE": "0", "NCCL_ALGO": "Ring",
    }  # fmt: skip
    for name, value in exported.items():
        assert len([remark for remark in found.remarks if remark.startswith(f"{name}={value} is exported")]) == 1
    assert resolve(NetworkSpec(debug="warn"), exported).variables["NCCL_DEBUG"] == "WARN"


def test_what_is_exported_as_the_job_has_it_or_empty_needs_no_word() -> None:
    for value in ("WARN", ""):
        assert resolve(NetworkSpec(), {"NCCL_DEBUG": value}).remarks == ()
    assert resolve(NetworkSpec(), {"NCCL_DEBUG": ""}).variables == {"NCCL_DEBUG": "WARN"}


def test_an_exported_nccl_timeout_is_translated_as_in_the_job_file() -> None:
    exported = {"NCCL_TIMEOUT": "900"}
    found = resolve(NetworkSpec(), exported)
    assert found.timeout == 900
    assert "network.timeout: 900s" in found.remarks[0]
    for section in ({"timeout": "10m"}, {"env": {"NCCL_TIMEOUT": "600"}}):
        explicit = resolve(NetworkSpec.model_validate(section), exported)
        assert explicit.timeout == 600
        assert "600 s, which takes precedence" in explicit.remarks[-1]
    slip = resolve(NetworkSpec(), {"NCCL_TIMEOUT": "15m"})
    assert slip.timeout == 1800
    assert "NCCL_TIMEOUT=15m" in slip.remarks[0]
