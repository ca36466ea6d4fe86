"""The command ``cluster-ddp``: finds a command's module, runs it, turns errors into messages and exit statuses.

A command is a module of this package with a function ``command``: its parameters are the options, its docstring the
help. Only the module of the command that was called is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from cluster_ddp import __version__
from cluster_ddp.spec.errors import ClusterDDPError

COMMANDS: dict[str, str] = {
    "submit": "Start",
    "local": "Start",
    "resume": "Start",
    "stop": "End",
    "cancel": "End",
    "status": "See",
    "list": "See",
    "checkpoints": "Results",
    "export": "Results",
    "templates": "Prepare",
}
"""Each command's name, in the order of the help, and the panel of the help that it stands in."""

DEBUG_VARIABLE = "CLUSTER_DDP_DEBUG"


class UnknownCommand(ClusterDDPError):
    """The first argument is no command."""

    def __init__(self, name: str) -> None:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        super().__init__(f"no command is called {name!r}.{meant}\nThe commands: {', '.join(COMMANDS)}")


class LazyCommands(TyperGroup):
    """The group of all commands; a command's module is imported when the command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands' names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, built from its module."""
        if cmd_name not in COMMANDS:
            raise UnknownCommand(cmd_name)
        module = importlib.import_module(f"cluster_ddp.cli.{cmd_name}")
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, rich_help_panel=COMMANDS[cmd_name])(module.command)
        return typer.main.get_command(single)


app = typer.Typer(
    name="cluster-ddp",
    cls=LazyCommands,
    help="Take a PyTorch DDP training job from a login node to the end of training on a Slurm cluster.",
    no_args_is_help=True,
    add_completion=False,
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


def main() -> None:
    """Entry point of ``cluster-ddp`` and of ``python -m cluster_ddp``."""
    try:
        app(prog_name="cluster-ddp")
    except ClusterDDPError as error:
        _complain(error, str(error))
        sys.exit(error.exit_status)
    except BrokenPipeError:
        # The reader (head, a pager) has seen enough. Without this Python complains once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _complain(
            error,
            f"unexpected {type(error).__name__}: {error}\n"
            f"This is a mistake in cluster_ddp; {DEBUG_VARIABLE}=1 shows where. Please report it with that output.",
        )
        sys.exit(1)


def _complain(error: BaseException, message: str) -> None:
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    print(f"cluster-ddp: {message}", file=sys.stderr)
