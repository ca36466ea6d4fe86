"""The text of the batch script: clean under shellcheck, its directives as sbatch reads them, hostile values intact."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from stage import Stage

from cluster_ddp.job import JobSpec, load_job, template_names
from cluster_ddp.launch.keeper.job_step import SRUN
from cluster_ddp.network import NetworkError
from cluster_ddp.run import runs as runs_module
from cluster_ddp.submit.quote import UnquotableError, comment, directive, quote, quote_around
from cluster_ddp.submit.script import ScriptError, check_before_sending, render_script

HOSTILE = [
    "$(touch pwned)", "`touch pwned`", "a b", "it's", 'say "x"', "x;touch pwned", "x && touch pwned", "a\nb", "-rf",
    "--help", "*", "?", "[a-z]", "~", "#x", "a #b", "back\\slash", "end\\", "$HOME", "${IFS}", "!!", "tab\there",
    "ünï©ode 日本", "{a,b}",
    "<(touch pwned)", "> pwned", "| touch pwned", "& touch pwned", "\r", "%j", "'; touch pwned; '", "\x1b[31m", "",
]  # fmt: skip
_OF_MORE_LINES = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _texts(hostile: list[str], characters: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    some = st.sampled_from(hostile)
    return st.one_of(some, st.text(characters, max_size=12), st.lists(some, min_size=2, max_size=3).map("".join))


TEXT = _texts(HOSTILE, st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
# Built of what one line may hold, so that hardly anything has to be filtered out.
LINE = _texts(
    [text for text in HOSTILE if text and not _OF_MORE_LINES.search(text)],
    st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]),
).filter(str.strip)
needs_shellcheck = pytest.mark.skipif(shutil.which("shellcheck") is None, reason="apt-get install shellcheck")
needs_sbatch = pytest.mark.skipif(shutil.which("sbatch") is None, reason="apt-get install slurm-client")


def job(**settings_: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "digits", "task": "pkg.mod:Task", **settings_})


def shellcheck(text: str) -> str:
    command = ["shellcheck", "-x", "--shell=bash", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False).stdout


CONTAINERS = [
    None,
    {"image": "docker://ghcr.io/x/y:1", "runtime": "apptainer", "mounts": ["/data:/data:ro", "a b"]},
    {"image": "y.sqsh", "runtime": "enroot", "mounts": ["/data:/data"]},
    {"image": "y.sqsh", "runtime": "pyxis", "mounts": ["/data:/data"]},
]


@needs_shellcheck
@pytest.mark.parametrize("template", template_names())
def test_shellcheck_finds_nothing_in_the_scripts_of_the_templates(template: str) -> None:
    assert shellcheck(render_script(load_job(template).spec, own_run_of=template).text) == ""


@needs_shellcheck
@pytest.mark.parametrize("container", CONTAINERS, ids=["bare", "apptainer", "enroot", "pyxis"])
def test_shellcheck_finds_nothing_in_a_script_that_has_everything(container: dict[str, Any] | None) -> None:
    spec = job(
        slurm={"nodes": 3, "gpus_per_node": "a100:4", "time": 90, "extra": {"mail-user": "a b", "exclusive": True}},
        launch={"container": container, "setup": ["export A=1", "true"], "port": 23456},
        network={"profile": "infiniband", "socket_ifname": "ib0", "debug": "detail", "env": {"A": "it's $(x)\ny"}},
        requeue={"signal": "HUP", "warning": 60},
    )
    assert shellcheck(render_script(spec).text) == ""


@needs_shellcheck
@pytest.mark.parametrize("name", ["requeue/start_failed.sh", "setup_guard.sh"])
def test_shellcheck_finds_nothing_in_what_a_script_calls(name: str) -> None:
    assert shellcheck((Path(runs_module.__file__).parent / name).read_text()) == ""


def test_no_line_is_too_long_to_read() -> None:
    text = render_script(load_job("multi-node").spec, python="python3", own_run_of="multi-node").text
    assert [line for line in text.splitlines() if len(line) > 120] == []


# Each example runs bash; a failing one is shown as it was found rather than after minutes of shrinking it.
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)


@settings(max_examples=15, phases=UNSHRUNK, suppress_health_check=[HealthCheck.too_slow])
@given(value=TEXT, argument=TEXT, script=LINE, python=LINE, ifname=LINE, runs=st.integers(0, 3))
def test_hostile_values_arrive_as_text_and_nothing_is_run(
    value: str, argument: str, script: str, python: str, ifname: str, runs: int
) -> None:
    """The script is really performed: what srun is called with, and what ranks find around them, is the value."""
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        program = stage.folder / "programs" / (re.sub(r"/", "_", python)[:20] + "-python")
        program.parent.mkdir()
        program.symlink_to(stage.bin / "python")
        written = stage.write(
            task=None,
            script=f"/code/{script}",
            args=[argument, *HOSTILE[runs * 8 : runs * 8 + 8]],
            launch={"python": str(program)},
            network={"socket_ifname": ifname, "env": {"VALUE": value}},
        )
        assert stage.perform(written) == 0, stage.output
        (step,) = stage.calls("srun")
        after = step.index("--redirects=3") + 1
        assert step[after:] == [f"/code/{script}", argument, *HOSTILE[runs * 8 : runs * 8 + 8]]
        assert step[len(SRUN) - 1] == str(program)
        environment = stage.environment_of_ranks()
        assert environment["VALUE"] == value
        assert environment["NCCL_SOCKET_IFNAME"] == ifname
        assert not list(stage.folder.rglob("pwned"))


@needs_shellcheck
@settings(max_examples=6)
@given(values=st.lists(TEXT, min_size=3, max_size=6), line=LINE)
def test_shellcheck_reads_hostile_values_as_text(values: list[str], line: str) -> None:
    spec = job(
        task=None, script="/code/x.py", args=values, slurm={"extra": {"mail-user": line}}, launch={"python": line},
        network={"env": {f"V{number}": value for number, value in enumerate(values)}},
    )  # fmt: skip
    # Literal carriage returns, odd spaces and typographic quotes draw remarks (SC1xxx) wherever they stand.
    codes = set(re.findall(r"SC\d+", shellcheck(render_script(spec).text)))
    assert {code for code in codes if not code.startswith("SC1")} == set()


@needs_sbatch
def test_sbatch_itself_reads_hostile_directives_as_text(tmp_path: Path) -> None:
    """With -vv sbatch prints the options that it has understood before it looks for a controller."""
    lines = [text for text in HOSTILE if text.strip() and not re.search(r"[\x00-\x1f]", text)]
    options = ["comment", "account", "constraint", "wckey", "reservation", "qos"]
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nSlurmctldPort=1\nNodeName=localhost\nPartitionName=p Nodes=ALL\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    environment["SLURM_CONF"] = str(tmp_path / "slurm.conf")
    groups = [lines[start : start + len(options)] for start in range(0, len(lines), len(options))]
    for group in groups:
        script = tmp_path / "job.sbatch"
        keys = ("account", "constraint", "reservation", "qos")
        chosen = dict(zip(options, group, strict=False))
        spec = job(
            slurm={
                **{k: v for k, v in chosen.items() if k in keys},
                "extra": {k: v for k, v in chosen.items() if k not in keys},
            }
        )
        script.write_text(render_script(spec).text)
        with subprocess.Popen(
            ["sbatch", "-vv", str(script)],
            env=environment,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        ) as sbatch:
            assert sbatch.stderr is not None
            seen: dict[str, str] = {}
            for line in sbatch.stderr:
                if "end of defined options" in line:
                    break
                if found := re.match(r"sbatch: ([a-z-]+) +: (.*)$", line):
                    seen[found[1]] = found[2]
            sbatch.kill()
        assert {option: seen.get(option) for option in chosen} == chosen
        assert seen["nodes"] == "1"
        assert seen["job-name"] == "digits"
    assert not (tmp_path / "pwned").exists()


@settings(max_examples=60)
@given(TEXT)
def test_quote_makes_one_word(value: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {quote(value)}"], capture_output=True, timeout=120, check=True
    )
    assert done.stdout == value.encode() + b"\0"


@settings(max_examples=30)
@given(TEXT, TEXT)
def test_quote_around_expands_the_marks_and_nothing_else(before: str, after: str) -> None:
    word = quote_around(f"{before}\0x\0{after}", {"\0x\0": "$x", "\0y\0": "$y"})
    done = subprocess.run(
        ["bash", "-c", f"x='a  *'; printf '%s\\0' {word}"], capture_output=True, timeout=120, check=True
    )
    assert done.stdout == f"{before}a  *{after}".encode() + b"\0"


def test_what_no_quoting_can_carry_is_refused() -> None:
    with pytest.raises(UnquotableError, match="NUL"):
        quote("a\0b")
    with pytest.raises(UnquotableError, match="--comment"):
        directive("comment", "a\n#SBATCH --nodes=99")


def test_a_comment_stays_on_its_line() -> None:
    assert comment("a\ntouch pwned") == "a touch pwned"


@pytest.mark.parametrize("line", ["echo 'unclosed", "cat <<END", "if true; then", "echo )"])
def test_a_setup_line_that_breaks_the_script_is_found_before_the_queue(line: str) -> None:
    with pytest.raises(ScriptError, match=r"launch\.setup"):
        check_before_sending(job(launch={"setup": [line]}))
    check_before_sending(job(launch={"setup": ["echo 'closed'", "cat <<END", "x", "END"]}))


def test_a_runs_folder_that_sbatch_cannot_write_output_to_is_found_before_the_queue() -> None:
    with pytest.raises(ScriptError, match=r"^runs_dir: /a\\b contains a backslash"):
        check_before_sending(job(runs_dir="/a\\b"))


def directives(**slurm: Any) -> list[str]:
    text = render_script(job(slurm=slurm)).text
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        ({"gpus_per_node": 4}, "gpus-per-node=4"),
        ({"gpus_per_node": "a100:4"}, "gpus-per-node=a100:4"),
        ({"gpus_per_node": 4, "gpu_option": "gres"}, "gres=gpu:4"),
        ({"gpus_per_node": "a100:4", "gpu_option": "gres"}, "gres=gpu:a100:4"),
        ({"gpus_per_node": 2, "gpu_option": "gres", "extra": {"gres": "tmp:100"}}, "gres=gpu:2,tmp:100"),
        ({"time": "1-12:00:00"}, "time=1-12:00:00"),
        ({"extra": {"exclusive": True}}, "exclusive"),
        ({"extra": {"switches": 1}}, "switches=1"),
        ({"extra": {"mail-type": "END,FAIL"}}, "mail-type=END,FAIL"),
        ({}, "signal=B:USR1@120"),
        ({}, "open-mode=append"),
        ({}, "requeue"),
        ({}, "ntasks-per-node=1"),
    ],
)
def test_directives(slurm: dict[str, Any], expected: str) -> None:
    assert expected in directives(**slurm)


def test_what_is_not_asked_for_is_not_there() -> None:
    lines = directives(extra={"exclusive": False})
    assert not [line for line in lines if line.startswith(("exclusive", "gpus", "gres", "time", "mem", "partition"))]


def test_an_expedited_requeue_is_asked_for_once() -> None:
    text = render_script(job(slurm={"extra": {"requeue": "expedite"}})).text
    assert [line for line in text.splitlines() if "SBATCH --requeue" in line] == ["#SBATCH --requeue=expedite"]


def test_no_requeues_means_no_requeue() -> None:
    assert "#SBATCH --no-requeue" in render_script(job(requeue={"max_requeues": 0})).text


def test_a_network_setting_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(NetworkError, match="NCCL_P2P_LEVEL"):
        render_script(job(network={"env": {"NCCL_P2P_LEVEL": "NVLINK"}}))


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "enroot"])
def test_ranks_run_in_the_container_and_the_keeper_outside(tmp_path: Path, runtime: str) -> None:
    """Inside it would find no scontrol."""
    stage = Stage(tmp_path)
    container = {"image": "y.sqsh", "runtime": runtime, "mounts": ["/a b:/data"]}
    assert stage.perform(stage.write(launch={"container": container, "python": "python3.11"})) == 0, stage.output
    (step,) = stage.calls("srun")
    run = str(stage.run)
    inside = {
        "pyxis": ["--container-image=y.sqsh", f"--container-mounts={run}:{run},/a b:/data"],
        "apptainer": ["apptainer", "exec", "--bind", run, "--bind", "/a b:/data", "y.sqsh"],
        "enroot": ["enroot", "start", "--rw", "--mount", f"{run}:{run}", "--mount", "/a b:/data", "y.sqsh"],
    }[runtime]
    assert step[len(SRUN) - 1 :][: len(inside) + 1] == [*inside, "python3.11"]
    assert stage.calls("python")[-1][:2] == ["-m", "cluster_ddp.launch.keeper"]
