"""`cluster-ddp local` and the local half of `resume`, as a person calls them."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from light_agent import LIGHT_AGENT
from waiting import wait_for

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.processes import is_alive
from cluster_ddp.printing import say
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import list_runs
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import PERSON, read_stop
from cluster_ddp.submit import local
from cluster_ddp.submit.base import SubmitError

HERE = Path(__file__).parent


PROJECT = HERE.parents[1]


PATIENCE = 90.0


Call = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """Start `cluster-ddp ...` in an empty folder with a job file in it; `light` where torchrun is not meant."""
    (tmp_path / "job.yaml").write_text(
        f"name: local\nscript: {HERE / 'beating_rank.py'}\nargs: ['30']\nlaunch: {{procs_per_node: 2}}\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CUDA_"))}
    environment |= {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "1", "SLURM_NODEID": "7"}
    environment.pop("CLUSTER_DDP_RUNS", None)
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str, within: Sequence[str] = (), light: bool = False, **options: Any
    ) -> subprocess.Popen[str]:
        variables = environment | ({"PYTHONPATH": LIGHT_AGENT} if light else {})
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": variables, **options}
        command = [*within, sys.executable, "-m", "cluster_ddp", *arguments]
        started.append(subprocess.Popen(command, cwd=tmp_path, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def the_run(folder: Path) -> RunDirectory:
    (run,) = list_runs(folder / "runs")
    return run


def wait_for_steps(folder: Path, attempt: int = 0) -> RunDirectory:
    """Wait until rank 0 of an attempt has trained ten steps."""
    logs = f"runs/*/attempts/{attempt:03d}/node-*.log"
    wait_for(lambda: any("step 10" in log.read_text() for log in folder.glob(logs)), "steps")
    return the_run(folder)


def children_of_run(run: RunDirectory) -> list[int]:
    """All processes that work for a run: they name it in their environment or in their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if str(run.path).encode() in text:
                    found.append(int(entry.name))
    return found


def test_two_nodes_of_two_ranks_meet_train_and_end_with_a_summary(call: Call, tmp_path: Path) -> None:
    status, out, err = finish(call("local", "job.yaml", "--nodes", "2", "--set", f"script={HERE / 'gloo_rank.py'}"))
    assert status == 0, err
    assert "step 30 of attempt 0" in out
    files = sorted(path.name for path in the_run(tmp_path).attempt(0).path.iterdir())
    assert [name for name in files if "node" in name] == ["node-0.log", "node-1.log"]
    assert len(files) <= 3 * 2 + 5, "three files for each node, and a few for the attempt"
    run = the_run(tmp_path)
    assert "COMPLETED" in err
    assert str(run.path) in err
    assert f"cluster-ddp status {run.id}" in err
    assert "cluster-ddp resume" not in err
    (started,) = [event for event in read_events(run) if event["event"] == "started"]
    assert started["world_size"] == 4
    assert len([event for event in read_events(run) if event["event"] == "node-finished"]) == 2


def test_ctrl_c_stops_with_status_5_and_resume_goes_on_with_the_same_size(call: Call, tmp_path: Path) -> None:
    process = call("local", "job.yaml", "--nodes", "2", "--procs", "1", "--set", "args=['100000']", "--json")
    run = wait_for_steps(tmp_path)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 5, err
    (line,) = out.splitlines()
    expected = {"run_id": run.id, "directory": str(run.path), "slurm_job_id": None, "state": "STOPPED"}
    assert json.loads(line) == expected
    assert "saving a checkpoint" in err
    assert "step 10" in err
    assert f"cluster-ddp resume {run.id}" in err
    assert describe(run, None).reason == "stopped by Ctrl-C"
    run.job_file.write_text(run.job_file.read_text().replace("100000", "20"))
    status, out, err = finish(call("resume", run.id, light=True))
    assert status == 0, err
    assert "step 20 of attempt 1" in out
    assert [event["world_size"] for event in read_events(run) if event["event"] == "started"] == [2, 2]


def test_the_signal_that_announces_an_end_stops_a_local_run_as_ctrl_c_does(call: Call, tmp_path: Path) -> None:
    """As other schedulers, or `timeout -s USR1`, send it. With nohup the end of the terminal does not stop it."""
    process = call("local", "job.yaml", "--procs", "1", "--set", "args=['100000']", light=True, within=["nohup"])
    run = wait_for_steps(tmp_path)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    status, _, err = finish(process)
    assert status == 5, err
    assert "SIGUSR1: saving a checkpoint" in err
    assert describe(run, None).state == "STOPPED"


def test_a_rank_that_fails_ends_all_with_status_4_and_is_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\nif os.environ['RANK'] == '1': raise KeyError('learning rate')\n")
    status, _, err = finish(call("local", "job.yaml", "--set", "script=bad.py", "--set", "args=[]"))
    assert status == 4
    assert "FAILED" in err
    assert "rank 1 on" in err
    assert "KeyError: 'learning rate'" in err
    assert "Traceback" not in err


def test_a_node_program_that_dies_takes_the_others_with_it(call: Call, tmp_path: Path) -> None:
    process = call("local", "job.yaml", "--nodes", "2", "--procs", "1", "--set", "args=['100000']")
    run = wait_for_steps(tmp_path)
    victim = next(event["pid"] for event in read_events(run) if event["event"] == "node-started" and event["node"] == 1)
    os.kill(victim, signal.SIGKILL)
    status, _, err = finish(process)
    assert status == 4 and "its node program was killed from outside" in err and "(SIGKILL)" in err
    assert children_of_run(run) == []


def test_nothing_survives_the_supervisor(call: Call, tmp_path: Path) -> None:
    process = call("local", "job.yaml", "--nodes", "2", "--procs", "1", "--set", "args=['100000']")
    run = wait_for_steps(tmp_path)
    process.kill()
    wait_for(lambda: not children_of_run(run), lambda: f"the end of {children_of_run(run)}", 10)
    assert not is_alive(process.pid)
    assert describe(run, None).state in (RunState.LOST, RunState.FAILED, RunState.STOPPED)


def test_a_dry_run_prints_the_commands_and_writes_nothing(
    call: Call, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tool = tmp_path_factory.mktemp("tools") / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    tool.chmod(0o755)
    variables = {**os.environ, "PYTHONPATH": str(PROJECT), "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    arguments = ("local", "job.yaml", "--nodes", "2", "--gpus", "0,1", "--procs", "1", "--dry-run")
    status, out, err = finish(call(*arguments, env=variables))
    assert status == 0, err
    first, second = out.splitlines()
    assert "cluster_ddp.launch.torchrun --nnodes=2 --nproc-per-node=1" in first
    assert "is_host=1" in first
    assert "is_host=0" in second
    assert "CUDA_VISIBLE_DEVICES=0" in err
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_on_a_terminal_the_ranks_are_told_which_it_is(call: Call, tmp_path: Path) -> None:
    (tmp_path / "bar.py").write_text("import os\nopen(os.environ['CLUSTER_DDP_TERMINAL'], 'w').write('a bar')\n")
    ours, theirs = pty.openpty()
    arguments = ("local", "job.yaml", "--set", "script=bar.py", "--set", "args=[]", "--procs", "1")
    status, _, err = finish(call(*arguments, light=True, stdout=theirs))
    assert status == 0, err
    os.set_blocking(ours, False)
    assert b"a bar" in os.read(ours, 10000)


PLAIN = """
import os, pathlib, signal, sys, time
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
assert pathlib.Path(os.environ["CLUSTER_DDP_RUN"], "job.yaml").exists()
saved = pathlib.Path("saved")
step = int(saved.read_text()) if "--resume" in sys.argv else 0
print("attempt", os.environ["CLUSTER_DDP_ATTEMPT"], "continues from step", step, flush=True)
while not stopped and step < int(sys.argv[1]):
    step += 1
    time.sleep(0.01)
    if step == 10:
        print("step 10", flush=True)
saved.write_text(str(step))
"""


def test_a_script_that_knows_nothing_of_this_is_stopped_told_of_and_resumed(call: Call, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    settings = ("script=plain.py", "args=['1000000']", "args_on_resume=['--resume']", "launch.procs_per_node=1")
    process = call("local", "job.yaml", *(word for setting in settings for word in ("--set", setting)), light=True)
    run = wait_for_steps(tmp_path)
    _, out, _ = finish(call("status", run.id))
    assert "unknown (the script does not report any)" in out
    assert "productive" not in out and "%" not in out
    _, _, err = finish(call("stop", run.id))
    assert "after 30 s it is killed, and anything it has not saved itself is lost" in err
    assert finish(process)[0] == 5
    reached = int((tmp_path / "saved").read_text())
    run.job_file.write_text(run.job_file.read_text().replace("1000000", str(reached + 5)))
    status, _, err = finish(call("resume", run.id, light=True))
    assert status == 0, err
    _, _, err = finish(call("resume", run.id))
    assert "to train further, give its script different arguments" in err and "train.epochs" not in err
    status, _, err = finish(call("resume", run.id, "--set", f"args=['{reached + 9}']", light=True))
    assert status == 0, err
    said = "".join(log.read_text() for log in run.path.rglob("node-0.log"))
    for attempt, step in ((0, 0), (1, reached), (2, reached + 5)):
        assert f"attempt {attempt} continues from step {step}\n" in said


RESTARTED = """
import os, pathlib, signal, time, torch.distributed as dist
signal.signal(signal.SIGTERM, signal.SIG_DFL)
dist.init_process_group("gloo")
dist.barrier()
failed = pathlib.Path("failed")
if not failed.exists():
    dist.barrier()
    if os.environ["RANK"] == "1":
        failed.touch()
        os._exit(1)
    time.sleep(600)
pathlib.Path("again-" + os.environ["RANK"]).touch()
while not pathlib.Path("end").exists():
    time.sleep(0.05)
"""


STRANGER = """
import os, socket, sys
os.setuid(65534)
for port in sys.argv[2:]:
    asked = socket.socket()
    asked.settimeout(5)
    print(asked.connect_ex((sys.argv[1], int(port))))
"""


OUTSIDE = "192.0.2.7"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network namespace")
def test_restarted_ranks_of_two_nodes_meet_again_where_only_this_machine_can_reach_them(
    call: Call, tmp_path: Path
) -> None:
    (tmp_path / "restarted.py").write_text(RESTARTED)
    network = f'ip link set lo up; ip address add {OUTSIDE} dev lo; exec "$@"'
    settings = ("script=restarted.py", "args=[]", "launch.max_restarts=1", "launch.procs_per_node=1")
    process = call(
        *("local", "job.yaml", "--nodes", "2"),
        *(word for setting in settings for word in ("--set", setting)),
        within=("unshare", "--net", "sh", "-c", network, "sh"),
    )
    wait_for(lambda: len(list(tmp_path.glob("again-*"))) == 2 or process.poll() is not None, "both ranks again")
    assert process.poll() is None
    listening = []
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]
        listening += [line.split()[1].split(":") for line in lines if line.split()[3] == "0A"]
    assert {address for address, _ in listening} == {"0100007F"}
    ports = sorted({str(int(port, 16)) for _, port in listening})
    assert len(ports) >= 2  # of the agents' store and of the ranks'
    stranger = ["nsenter", f"--net=/proc/{process.pid}/ns/net", sys.executable, "-c", STRANGER, OUTSIDE, *ports]
    answers = subprocess.run(stranger, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert set(answers) == {str(errno.ECONNREFUSED)}
    (tmp_path / "end").touch()
    assert finish(process)[0] == 0


def test_a_closed_terminal_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    say("anything")


def test_ctrl_c_while_an_attempt_begins_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = local.begin_attempt

    def interrupted(*arguments: Any, **options: Any) -> Any:
        attempt = begin(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        return attempt

    monkeypatch.setattr(local, "begin_attempt", interrupted)
    monkeypatch.setattr(local.Supervisor, "start_node", lambda *_: subprocess.Popen(["sleep", "0.5"]))
    spec = JobSpec(name="x", script="x.py", runs_dir=str(tmp_path))
    run, status = local.start_local(local.plan_local(spec, gpus="none"), show=sys.stdout)
    request = read_stop(run.attempt(0))
    assert request is not None and request.reason == PERSON
    assert status.state is RunState.STOPPED


def test_ctrl_c_reaches_the_ranks_where_no_stop_file_can_be_written(call: Call, tmp_path: Path) -> None:
    """As on a full disk: the supervisor signals its nodes instead of ending with an error of its own."""
    process = call("local", "job.yaml", "--set", "args=['100000']", light=True)
    run = wait_for_steps(tmp_path)
    run.attempt(0).stop_file.mkdir()  # instead of the file: it can be neither written nor replaced
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert "the nodes are signalled instead" in err
    assert status == 5 and "STOPPED" in err


def test_a_run_whose_directory_vanishes_ends_at_ctrl_c_and_goes_on_where_it_is_then(call: Call, tmp_path: Path) -> None:
    process = call("local", "job.yaml", "--set", "args=['100000']")
    run = wait_for_steps(tmp_path)
    moved = run.path.rename(tmp_path / "moved")
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert "the nodes are signalled instead" in err and f"{run.path} is gone" in err and "Traceback" not in err
    assert status == 4
    assert finish(call("resume", str(moved), "--set", "args=['3']", light=True))[0] == 0


FILLS_ITS_DISK = """
import os, pathlib
with open(pathlib.Path(os.environ["CLUSTER_DDP_RUN"]) / "filler", "wb", buffering=0) as file:
    while True:
        file.write(bytes(4096))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small disk")
def test_a_run_that_ends_on_a_full_disk_is_lost_and_says_why(call: Call, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "fill.py").write_text(FILLS_ITS_DISK)
    small = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=400k tmpfs runs && exec "$@"', "sh")
    words = ("local", "job.yaml", "--procs", "1", "--set", "script=fill.py", "--set", "args=[]")
    status, _, err = finish(call(*words, within=small, light=True))
    assert status == 4 and "LOST" in err and "Traceback" not in err.partition("LOST")[2]
    assert "the end of attempt 0 cannot be recorded in " in err and "No space left on device" in err


def test_modules_in_the_current_folder_do_not_replace_pythons_own(call: Call, tmp_path: Path) -> None:
    for name in ("json", "select", "selectors", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')\n")
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "cluster_ddp", "local", "job.yaml", "--set", "args=[1]"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def test_the_interpreter_that_the_job_names_is_used_here_too(tmp_path: Path) -> None:
    other, used = tmp_path / "other-python", tmp_path / "used"
    other.write_text(f'#!/bin/sh\necho "$@" >> {used}\nexit 3\n')
    other.chmod(0o755)
    spec = JobSpec(name="a", script="train.py", launch={"python": str(other)}, runs_dir=str(tmp_path / "runs"))
    with (tmp_path / "shown").open("w") as show:
        local.start_local(local.plan_local(spec, procs=1, gpus="none"), show=show)
    assert used.read_text().startswith("-m cluster_ddp.launch.node ")
    missing = spec.model_copy(update={"launch": spec.launch.model_copy(update={"python": "/no/python"})})
    with pytest.raises(SubmitError, match=r"launch\.python: /no/python is not on this machine"):
        local.plan_local(missing)
