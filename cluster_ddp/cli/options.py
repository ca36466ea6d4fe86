"""The arguments and options that several commands share, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

Job = Annotated[str, typer.Argument(metavar="JOB", help="A job file, or a template's name.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, run id, or unique prefix of one.")]
RunOrSweep = Annotated[
    str, typer.Argument(metavar="RUN", help="Run or sweep: its directory, its id, or a unique prefix of one.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting: train.lr=0.1. Repeatable.")
]
JsonLine = Annotated[bool, typer.Option("--json", help="End with one line of JSON on standard output.")]
JsonList = Annotated[bool, typer.Option("--json", help="A JSON list.")]
