"""The types of job file values: what is accepted, and the error message for anything else.

A validator here raises `refused`, whose message names what is allowed; the messages for pydantic's own errors (a wrong
type, a number out of bounds) are in `report`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from cluster_ddp.job.units import DURATION_FORMS, SLURM_TIME_FORMS, parse_duration, parse_slurm_time

REFUSED = "refused"
CONTRADICTION = "contradiction"
MAX_SECONDS = 10 * 365 * 86400  # seconds: ten years, so that a typo cannot overflow Slurm's minutes
MAX_INT = 2**31 - 1

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_CONTROL = r"[\x00-\x1f\x7f-\x9f\u2028\u2029]"
_MEMORY = r"[0-9]{1,9}(?:\.[0-9]{1,3})?[KMGTkmgt]?"
_GPUS = r"(?:([A-Za-z][A-Za-z0-9_.-]{0,63}):)?([0-9]{1,4})"
_STEPS = r"([0-9]{1,9})\s*(?:steps?)?"
_STEP_RANGE = r"([0-9]{1,9})\s*-\s*([0-9]{1,9})"
_OCCASIONS = ("completed", "failed", "stalled")
_TARGET = r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^\x00-\x1f]*\.py):[A-Za-z_]\w*"


def refused(message: str, *, allowed: str = "", at: tuple[str, ...] = (), show: bool = True) -> PydanticCustomError:
    """Return the error that a validator raises: what is wrong, what is allowed, and where below the model it is.

    With ``show=False`` the value is kept out of the report, because it may be a secret.
    """
    return PydanticCustomError(REFUSED, "{message}", {"message": message, "allowed": allowed, "at": at, "show": show})


def contradiction(message: str, at: str, *, instead: str = "") -> PydanticCustomError:
    """Return the error for settings that exclude each other; `at` is the key to report, such as ``train.steps``."""
    where = tuple(at.split("."))
    return PydanticCustomError(
        CONTRADICTION, "{message}", {"message": message, "allowed": instead, "at": where, "show": True}
    )


def _string(value: object, allowed: str) -> str:
    if not isinstance(value, str):
        raise refused("is not a string", allowed=allowed)
    return value


def line(value: object) -> str:
    """Validate a non-empty string of one line, fit for an ``#SBATCH`` line or a path."""
    text = _string(value, "a string of one line")
    if not text.strip():
        raise refused("is empty", allowed="a string; omit the key, or give it no value, for the default")
    if re.search(_CONTROL, text) or not _is_encodable(text):
        raise refused("contains a line break or another control character", allowed="a string of one line")
    return text


def _no_number(value: object) -> str:
    """Validate a line, such as a folder, in which a bare number is more likely a mistake."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise refused("is a number", allowed="a string of one line; in quotes, if the number is meant")
    return line(value)


def _any_string(value: object) -> str:
    """Validate any string that can be passed to a process as an argument or an environment value."""
    text = _string(value, "a string")
    if "\0" in text or not _is_encodable(text):
        raise refused(
            "contains a character that cannot be passed to a process", allowed="a string without NUL characters"
        )
    return text


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _name(value: object) -> str:
    allowed = "letters, digits, '.', '_' and '-', at most 64, a letter or digit first (it names a folder and the job)"
    text = _string(value, allowed)
    if not re.fullmatch(_NAME, text):
        fitting = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64]
        raise refused("cannot name a job", allowed=allowed + (f', such as "{fitting}"' if fitting else ""))
    return text


def _duration(value: object, parse: Callable[[str], int], forms: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise refused("is not a duration", allowed=forms)
    try:
        seconds = parse(str(value))
    except ValueError as error:
        raise refused("is not a duration", allowed=forms) from error
    if not 1 <= seconds <= MAX_SECONDS:
        raise refused("is not between one second and ten years", allowed=forms)
    return seconds


def _seconds_or_auto(value: object) -> int | str:
    return "auto" if value == "auto" else _duration(value, parse_duration, f'"auto", {DURATION_FORMS}')


def _whole_or_auto(value: object, low: int, high: int) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bounds = f"at least {low}" if high == MAX_INT else f"from {low} to {high}"
        raise refused("is not allowed", allowed=f"auto, or a whole number {bounds}")
    return value


def _gpus(value: object) -> int | str:
    allowed = 'a whole number such as 4 (0 for none), or a type and a number such as "a100:4"'
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 9999:
        return value
    match = re.fullmatch(_GPUS, value) if isinstance(value, str) else None
    if match is None or (match[1] and int(match[2]) == 0):
        raise refused("is not a number of GPUs", allowed=allowed)
    return f"{match[1]}:{int(match[2])}" if match[1] else int(match[2])


def _memory(value: object) -> str:
    text = _string(value, 'a size such as "200G"')
    if not re.fullmatch(_MEMORY, text):
        raise refused("is not a size of memory", allowed='a number with K, M, G or T such as "200G"; 0 for all')
    return text


def _signal(value: object) -> str:
    signal = _string(value, "USR1, USR2 or HUP").upper().removeprefix("SIG")
    if signal not in ("USR1", "USR2", "HUP"):
        raise refused("cannot be the warning signal", allowed="USR1, USR2 or HUP")
    return signal


def _evaluation(value: object) -> int | str:
    if value in ("epoch", "end"):
        return str(value)
    match = re.fullmatch(_STEPS, str(value)) if isinstance(value, (int, str)) and not isinstance(value, bool) else None
    if match is None or int(match[1]) == 0:
        raise refused("is not allowed", allowed='"epoch", "end", or a number of steps such as "500 steps"')
    return int(match[1])


def _step_range(value: object) -> tuple[int, int]:
    allowed = 'a first and a last step such as "10-20"'
    if isinstance(value, (list, tuple)) and len(value) == 2:
        value = "-".join(map(str, value))
    match = re.fullmatch(_STEP_RANGE, value) if isinstance(value, str) else None
    if match is None or int(match[1]) > int(match[2]):
        raise refused("is not a range of steps", allowed=allowed)
    return int(match[1]), int(match[2])


def _target(value: object) -> str:
    allowed = '"package.module:Class" or "path/to/file.py:Class"'
    text = _string(value, allowed)
    if not re.fullmatch(_TARGET, text):
        raise refused("does not name a task", allowed=allowed)
    return text


def _occasions(value: object) -> tuple[str, ...]:
    allowed = "a list of one or more of: completed, failed, stalled"
    if not isinstance(value, (list, tuple)) or not value or not all(entry in _OCCASIONS for entry in value):
        raise refused("must name when to notify", allowed=allowed, show=False)
    return tuple(occasion for occasion in _OCCASIONS if occasion in value)


def _sequence(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


NO_NUMBER = "no number"
"""Marks a string that must not be written as a bare number."""

Line = Annotated[str, PlainValidator(line)]
Text = Annotated[str, PlainValidator(_no_number), NO_NUMBER]
Name = Annotated[str, PlainValidator(_name)]
Seconds = Annotated[int, PlainValidator(partial(_duration, parse=parse_duration, forms=DURATION_FORMS))]
SlurmTime = Annotated[int, PlainValidator(partial(_duration, parse=parse_slurm_time, forms=SLURM_TIME_FORMS))]
SecondsOrAuto = Annotated[int | Literal["auto"], PlainValidator(_seconds_or_auto)]
PositiveIntOrAuto = Annotated[int | Literal["auto"], PlainValidator(partial(_whole_or_auto, low=1, high=MAX_INT))]
PortOrAuto = Annotated[int | Literal["auto"], PlainValidator(partial(_whole_or_auto, low=1024, high=65535))]
Gpus = Annotated[int | str, PlainValidator(_gpus)]
Memory = Annotated[str, PlainValidator(_memory)]
Signal = Annotated[str, PlainValidator(_signal)]
Evaluation = Annotated[int | Literal["epoch", "end"], PlainValidator(_evaluation)]
StepRange = Annotated[tuple[int, int], BeforeValidator(_step_range)]
Target = Annotated[str, PlainValidator(_target)]
Occasions = Annotated[tuple[str, ...], PlainValidator(_occasions)]
AnyString = Annotated[str, PlainValidator(_any_string)]
Strings = Annotated[tuple[AnyString, ...], BeforeValidator(_sequence)]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Params = dict[str, Any]
