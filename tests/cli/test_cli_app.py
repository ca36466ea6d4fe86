"""The frame of the command line: lazy modules, help, errors, exit statuses."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_stage import Call

from cluster_ddp import __version__
from cluster_ddp.cli.app import COMMANDS
from cluster_ddp.job import template_names

CHECKOUT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "submitit", "wandb", "numpy")


def modules_after(*arguments: str, cwd: Path) -> set[str]:
    """The modules that a call has imported, in a process of its own."""
    code = (
        "import atexit, sys, cluster_ddp.process\n"  # its exit function, which comes last, ends the process
        "atexit.register(lambda: print('MODULES', *sorted(sys.modules), file=sys.stderr))\n"
        f"sys.argv = ['cluster-ddp', *{list(arguments)!r}]\n"
        "from cluster_ddp.__main__ import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "CLUSTER_DDP_RUNS": str(cwd / "runs")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("MODULES ")]
    return set(line.split()[1:])


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'cluster_ddp.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from cluster_ddp.__main__ import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "multi-node", "--dry-run"),
        ("sweep", "multi-node", "--grid=train.seed=1,2", "--dry-run"),
        ("status",),
        ("list",),
        ("templates",),
        ("--help",),
        ("--version",),
    ],
    ids=" ".join,
)
def test_a_login_node_imports_nothing_heavy(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert not modules_after(*arguments, cwd=tmp_path) & set(HEAVY)


def test_a_dry_run_imports_only_what_it_needs(tmp_path: Path) -> None:
    """What makes a command line slow to start, and what the other commands need."""
    modules = modules_after("submit", "multi-node", "--dry-run", cwd=tmp_path)
    assert not modules & {"rich", "ClusterShell", "asyncio", "cluster_ddp.cli.status", "cluster_ddp.cli.local"}
    assert not modules & {"importlib.metadata", "cluster_ddp.run.record", "cluster_ddp.run.events"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_and_a_help(name: str, call: Call) -> None:
    module = importlib.import_module(f"cluster_ddp.cli.{name}")
    assert module.command.__doc__
    said = call(name, "--help")
    assert said.status == 0
    words = shlex.split(COMMANDS[name].example)
    assert words[0] == name and f"Example: cluster-ddp {name}" in said.out
    assert all(word in said.out for word in words if word.startswith("-"))
    assert "Usage: cluster-ddp" in said.out and name in said.out


def test_the_help_names_every_command(call: Call) -> None:
    said = call("--help")
    assert said.status == 0
    for name in COMMANDS:
        assert f" {name} " in said.out


def test_no_arguments_show_the_help(call: Call) -> None:
    said = call()
    assert "submit" in said.out + said.err


def test_version(call: Call) -> None:
    assert call("--version").out == f"cluster-ddp {__version__}\n"


def test_a_misspelt_command_names_the_nearest(call: Call) -> None:
    said = call("sumbit", "x")
    assert said.status == 2
    assert "Did you mean submit?" in said.err


def test_a_misspelt_option_is_status_2(call: Call) -> None:
    assert call("submit", "multi-node", "--dryrun").status == 2


def test_an_error_of_ours_is_one_line_unless_asked(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("cluster_ddp.cli.templates.template_names", broken)
    said = call("templates")
    assert said.status == 1
    assert "unexpected ZeroDivisionError: oh" in said.err
    assert "Traceback" not in said.err
    monkeypatch.setenv("CLUSTER_DDP_DEBUG", "1")
    assert "Traceback" in call("templates").err


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    command = f"{sys.executable} -m cluster_ddp submit multi-node --dry-run | head -n 1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert done.stdout == "#!/bin/bash\n"
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def shell(line: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `ddp` is the command, its output buffered as Python does by default."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(CHECKOUT), "CLUSTER_DDP_RUNS": "runs", **variables}
    script = f'ddp() {{ "{sys.executable}" -m cluster_ddp "$@"; }}\n{line}'
    return subprocess.run(["bash", "-c", script], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", ["list --json", "templates", "--help", "submit multi-node --dry-run"])
def test_a_reader_that_reads_nothing_is_no_failure(arguments: str, tmp_path: Path) -> None:
    done = shell(f"ddp {arguments} | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr and "rror" not in done.stderr


@pytest.mark.parametrize("arguments", ["list --json", "templates", "submit multi-node --dry-run"])
def test_output_that_cannot_be_written_is_said_once(arguments: str, tmp_path: Path) -> None:
    done = shell(f"ddp {arguments} >/dev/full", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("No space left on device") == 1
    assert "Traceback" not in done.stderr and "unexpected" not in done.stderr


@pytest.mark.parametrize(("line", "status"), [("templates", 0), ("status nosuch", 2), ("submit nosuch.yaml", 2)])
def test_what_cannot_be_said_to_a_person_does_not_change_the_exit_status(
    line: str, status: int, tmp_path: Path
) -> None:
    assert shell(f"ddp {line} 2>/dev/full", tmp_path).returncode == status


def test_a_line_of_json_that_cannot_be_written_does_not_deny_what_was_done(tmp_path: Path) -> None:
    """Exit status 2 after a submission would have a program submit it once more."""
    code = (
        "from cluster_ddp.cli.output import print_json_line; from cluster_ddp.run.directory import RunDirectory; "
        "from cluster_ddp.run.run_state import RunState; from pathlib import Path; "
        "from cluster_ddp.process import fast_exit; "
        "print_json_line(RunDirectory(Path('/runs/x')), '7', RunState.PENDING); fast_exit(0)"
    )
    done = shell(f'"{sys.executable}" -c "{code}" >/dev/full', tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "cluster-ddp: could not write the --json line: No space left on device\n"


def left(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A process that ends as ours do."""
    code = f"import atexit, sys, threading, time\nfrom cluster_ddp.process import fast_exit\n{code}"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_work_in_threads_is_waited_for_before_a_process_ends_well(tmp_path: Path) -> None:
    pool = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def work(name): time.sleep(0.3); open(name, 'w').close()\n"
        "pool = ThreadPoolExecutor(1); pool.submit(work, 'pool')\n"
        "threading.Thread(target=work, args=('thread',)).start()\n"
        "atexit.register(print, 'at the end')\n"
    )
    done = left(f"{pool}fast_exit(0)", tmp_path)
    assert (done.returncode, done.stdout) == (0, "at the end\n")
    assert {path.name for path in tmp_path.iterdir()} == {"pool", "thread"}


def test_a_process_that_has_failed_waits_for_no_thread(tmp_path: Path) -> None:
    done = left("threading.Thread(target=time.sleep, args=(60,)).start()\nprint('x')\nfast_exit(1)", tmp_path)
    assert (done.returncode, done.stdout) == (1, "x\n")


def test_what_was_registered_for_the_end_is_called_after_a_failure_too(tmp_path: Path) -> None:
    done = left("atexit.register(print, 'at the end')\nfast_exit(3)", tmp_path)
    assert (done.returncode, done.stdout) == (3, "at the end\n")


def test_the_interpreter_is_not_taken_down(tmp_path: Path) -> None:
    code = "class Module:\n    def __del__(self): print('taken down')\nmodule = Module()\n"
    assert left(f"{code}sys.exit(0)", tmp_path).stdout == "taken down\n"
    done = left(f"{code}fast_exit(0)", tmp_path)
    assert done.stdout == "", f"Python {sys.version} does not call what was registered with atexit first last of all"


def test_a_standard_output_of_the_users_own_that_cannot_be_flushed_is_no_failure(tmp_path: Path) -> None:
    done = left("sys.stdout = open('log', 'w'); sys.stdout.close()\nfast_exit(0)", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_has_closed(closed: str, tmp_path: Path) -> None:
    assert shell(f"ddp list {closed} && ddp list --json {closed}", tmp_path).returncode == 0


def test_a_current_folder_that_is_gone(tmp_path: Path) -> None:
    for arguments in ("status", "submit multi-node --dry-run", "local cpu"):
        done = shell(f"mkdir gone; cd gone; rmdir ../gone; ddp {arguments}", tmp_path)
        assert done.returncode == 2
        assert done.stderr == "cluster-ddp: the current folder no longer exists; cd to another one\n"


def test_a_folder_of_runs_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    done = shell("ddp list --json; CLUSTER_DDP_RUNS=$'r\\xff' ddp submit multi-node --dry-run", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_path_that_the_shells_encoding_lacks_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\nscript: a.py\nruns_dir: ä\n", encoding="utf-8")
    (tmp_path / "a.py").touch()
    done = shell("ddp local job.yaml", tmp_path, LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 2, done.stderr
    assert "\\xe4' cannot be expressed in this shell's encoding, ascii: export LC_ALL=C.UTF-8" in done.stderr


def test_a_folder_of_runs_that_cannot_be_read_is_an_error(call: Call, here: Path, no_slurm: None) -> None:
    (here / "runs").touch()
    for command in ("list", "status", "clean"):
        said = call(command)
        assert said.status == 2 and f"{here}/runs cannot be read: Not a directory" in said.err, (command, said)


def test_templates_are_listed_with_what_they_are_for(call: Call) -> None:
    said = call("templates")
    lines = said.out.splitlines()
    assert [line.split()[0] for line in lines] == template_names()
    assert all(len(line.split()) > 3 for line in lines)


def test_a_template_is_printed_as_it_is(call: Call) -> None:
    said = call("templates", "show", "multi-node")
    assert said.out == (CHECKOUT / "job_templates" / "multi-node.yaml").read_text()


@pytest.mark.parametrize("arguments", [("show",), ("print", "cpu"), ("show", "multi-nod")])
def test_wrong_calls_of_templates(call: Call, arguments: tuple[str, ...]) -> None:
    said = call("templates", *arguments)
    assert said.status == 2
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("su", ["submit"]),
        ("submit multi", ["multi-node"]),
        ("submit --dr", ["--dry-run"]),
        ("status dig", ["digits-1"]),
        ("export dig", ["digits-1"]),
    ],
)
def test_the_shell_completes_commands_options_runs_and_templates(
    words: str, completed: list[str], tmp_path: Path
) -> None:
    (tmp_path / "digits-1").mkdir()
    given = f"cluster-ddp {words}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "CLUSTER_DDP_RUNS": str(tmp_path),
        "_CLUSTER_DDP_COMPLETE": "complete_bash",
        "COMP_WORDS": given,
        "COMP_CWORD": str(len(words.split())),
    }
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cluster_ddp"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == completed
    assert "pydantic" not in done.stderr and "yaml" not in done.stderr, "the shell waits for these"
