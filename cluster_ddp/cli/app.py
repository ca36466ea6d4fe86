"""The command ``cluster-ddp``: finds a command's module, runs it, turns errors into messages and exit statuses.

A command is a module of this package with a function ``command``: its parameters are the options, its docstring the
help. A new one is such a module and a line in `COMMANDS`. Only the module of the command that was called is imported.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from cluster_ddp import __version__
from cluster_ddp.cli.output import discard_output, inform
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.job.nearest import nearest
from cluster_ddp.process import limit_umask


class Help(NamedTuple):
    """What the help says about a command besides its docstring."""

    panel: str
    example: str  # a call of it


COMMANDS: dict[str, Help] = {
    "submit": Help("Start", "submit job.yaml --set train.lr=0.01"),
    "local": Help("Start", "local job.yaml --nodes 2 --procs 2"),
    "sweep": Help("Start", "sweep job.yaml --grid train.lr=1e-3,1e-4"),
    "launch": Help("Start", "launch job.yaml --run /shared/runs/first --nnodes 2 --node-rank 0 --master-addr node1"),
    "resume": Help("Start", "resume digits-2026 --nodes 4"),
    "stop": Help("End", "stop digits-2026"),
    "cancel": Help("End", "cancel digits-2026"),
    "status": Help("Watch", "status digits-2026 --watch"),
    "list": Help("Watch", "list --json"),
    "logs": Help("Watch", "logs digits-2026 --errors"),
    "checkpoints": Help("Results", "checkpoints digits-2026 --verify"),
    "export": Help("Results", "export digits-2026 --best -o weights.safetensors"),
    "clean": Help("Results", "clean --older 60d --yes"),
    "rehearse": Help("Prepare", "rehearse job.yaml --steps 40 --stop-after 15"),
    "init": Help("Prepare", "init"),
    "templates": Help("Prepare", "templates show multi-node"),
}
"""Every command by its name, in the order of the help."""

DEBUG_VARIABLE = "CLUSTER_DDP_DEBUG"


class UnknownCommand(ClusterDDPError):
    """The first argument is not a command."""

    def __init__(self, name: str) -> None:
        near = nearest(name, COMMANDS)
        meant = f" Did you mean {near}?" if near else ""
        super().__init__(f"there is no command {name!r}.{meant}\nThe commands: {', '.join(COMMANDS)}")


class LazyCommands(TyperGroup):
    """The group of all commands; a command's module is imported when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands' names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, built from its module."""
        if cmd_name not in COMMANDS:
            raise UnknownCommand(cmd_name)
        module = importlib.import_module(f"cluster_ddp.cli.{cmd_name}")
        single = typer.Typer(add_completion=False)
        listed = COMMANDS[cmd_name]
        epilog = f"Example: cluster-ddp {listed.example}"
        single.command(cmd_name, rich_help_panel=listed.panel, epilog=epilog)(module.command)
        return typer.main.get_command(single)


app = typer.Typer(
    name="cluster-ddp",
    cls=LazyCommands,
    help="Take a PyTorch DDP training job from a login node to the end of training on a Slurm cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        typer.echo(f"cluster-ddp {__version__}")
        raise typer.Exit()


def main() -> int:
    """Run the command that `sys.argv` names, and give its exit status."""
    _prepare_streams()
    limit_umask()
    status = _status_of_call()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
    except OSError as error:
        _complain(error, _describe(error))
        discard_output()
        status = status or ClusterDDPError.exit_status
    return status


def _status_of_call() -> int:
    try:
        app(prog_name="cluster-ddp")
    except SystemExit as end:  # how typer ends, also when the reader (head, a pager) has closed the pipe
        if not isinstance(end.__context__, BrokenPipeError):
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        discard_output()
    except BrokenPipeError:
        discard_output()
    except ClusterDDPError as error:
        _complain(error, str(error))
        return error.exit_status
    except OSError as error:
        _complain(error, _describe(error))
        discard_output()  # it may be what cannot be written to
        return ClusterDDPError.exit_status
    except KeyboardInterrupt:
        return 130
    except UnicodeEncodeError as error:
        if error.encoding == "utf-8":
            raise
        _complain(
            error,
            f"{error.object!a} cannot be expressed in this shell's encoding, {error.encoding}: export LC_ALL=C.UTF-8 "
            "and unset PYTHONUTF8",
        )
        return ClusterDDPError.exit_status
    except Exception as error:
        _complain(
            error,
            f"unexpected {type(error).__name__}: {error}\n"
            f"This is a bug in cluster_ddp; {DEBUG_VARIABLE}=1 shows where. Please report it with that output.",
        )
        return 1
    return 0


def _prepare_streams() -> None:
    """Open standard streams that the caller has closed, and let no character that cannot be shown end a command."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - stays open until the end
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _describe(error: OSError) -> str:
    """What the system refused, and where."""
    try:
        Path.cwd()
    except OSError:
        return "the current folder no longer exists; cd to another one"
    files = " -> ".join(str(file) for file in (error.filename, error.filename2) if file is not None)
    what = error.strerror or str(error) or type(error).__name__
    return f"{files}: {what}" if files else f"{what} (while reading or writing; {DEBUG_VARIABLE}=1 shows where)"


def _complain(error: BaseException, message: str) -> None:
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    inform(f"cluster-ddp: {message}")
