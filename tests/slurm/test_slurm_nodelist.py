"""Node lists: Slurm's order, padding, and malformed ones; held against scontrol itself where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster_ddp.slurm import nodelist
from cluster_ddp.slurm.nodelist import NodeListError, expand, first_host


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a[1-3,07],b12", ["a1", "a2", "a3", "a07", "b12"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("b12,a[3,1]", ["b12", "a3", "a1"]),
        ("a[9-011]", ["a9", "a10", "a11"]),
        ("a[098-101]", ["a098", "a099", "a100", "a101"]),
        ("gpu-a.cluster_1", ["gpu-a.cluster_1"]),
        ("a[1-2]-ib", ["a1-ib", "a2-ib"]),
        (" a1\n", ["a1"]),
    ],
)
def test_expand(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts
    assert first_host(text) == hosts[0]


def test_ten_thousand_nodes() -> None:
    hosts = expand("n[00001-10000]")
    assert len(hosts) == 10_000
    assert hosts[0] == "n00001"
    assert hosts[-1] == "n10000"


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ",", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[-1]", "a[1-2", "a[2-1]", "a[1,]", "a[x]", "a b", "a[[1]]",
        "-a", "a[1-2]]", "$(hostname)", "a;b", "a[1-999999999]", "a[1-2000]b[1-2000]", "a[٣]",
    ],
)  # fmt: skip
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(NodeListError, match="node list"):
        expand(text)


def test_a_message_about_a_long_list_stays_short() -> None:
    with pytest.raises(NodeListError) as caught:
        expand("n," * 5000)
    assert len(str(caught.value)) < 200


RANGE = st.one_of(
    st.integers(0, 120).map(str),
    st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(1, 4)).map(
        lambda t: f"{t[0]:0{t[2]}d}-{t[0] + t[1]:0{t[2]}d}"
    ),
)
ITEM = st.tuples(
    st.sampled_from(["n", "gpu-", "a.b_"]), st.lists(RANGE, min_size=1, max_size=3), st.sampled_from(["", "r[1-2]"])
).map(lambda t: f"{t[0]}{t[2]}{'x' if t[2] else ''}[{','.join(t[1])}]")


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="apt-get install slurm-client")
@settings(max_examples=40)
@given(items=st.lists(st.one_of(ITEM, st.sampled_from(["z1", "login", "m[3,1]"])), min_size=1, max_size=4))
def test_the_hosts_are_those_of_scontrol(items: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    conf = tmp_path_factory.getbasetemp() / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=ALL\n")
    text = ",".join(items)
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={**os.environ, "SLURM_CONF": str(conf)}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert expand(text) == done.stdout.split()


def test_an_scontrol_that_hangs_does_not_hold_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked about what this module cannot read."""
    scontrol = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setattr(nodelist, "SCONTROL_SECONDS", 0.5)
    for does, printed in (("sleep 60", ""), ("exit 1", ""), ("echo Welcome to the cluster; echo b; echo a", "b\n")):
        scontrol.write_text(f"#!/bin/bash\n{does}\n")
        scontrol.chmod(0o755)
        assert nodelist.main(["--first", "new{b,a}"]) == (0 if printed else 2)
        assert capsys.readouterr().out == printed


def test_as_a_command() -> None:
    command = [sys.executable, "-m", "cluster_ddp.slurm.nodelist"]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    good = subprocess.run([*command, "a[1-2]"], env=here, capture_output=True, text=True, timeout=120)
    assert (good.returncode, good.stdout) == (0, "a1\na2\n")
    first = subprocess.run([*command, "--first", "b[3,1]"], env=here, capture_output=True, text=True, timeout=120)
    assert (first.returncode, first.stdout) == (0, "b3\n")
    bad = subprocess.run([*command, "a["], env=here, capture_output=True, text=True, timeout=120)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "Traceback" not in bad.stderr
