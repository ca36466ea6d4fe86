"""Durations as written by people and by Slurm. Inside the program a duration is a whole number of seconds."""

from __future__ import annotations

import re

_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_PART = r"(\d{1,20})\s*(sec|min|[smhd])"
_PARTS = rf"{_PART}(?:\s*{_PART}){{0,3}}"
_CLOCK = r"(?:(\d{1,20})-)?(\d{1,20})(?::(\d{1,2}))?(?::(\d{1,2}))?"

DURATION_FORMS = 'a number with a unit such as "90s", "1h 30m" or "2d", or a whole number of seconds'
SLURM_TIME_FORMS = (
    'one of Slurm\'s forms ("04:00:00", "1-12:00:00", "30" for 30 minutes, "30:00" for minutes:seconds, "2-6" for '
    'days-hours), or a number with a unit such as "90m" or "4h 30m"'
)


def parse_duration(text: str) -> int:
    """Return the seconds of ``"90s"``, ``"10m"``, ``"1h 30m"``, ``"2d"``, ``"90"``; raises `ValueError` otherwise."""
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    return _with_units(text)


def parse_slurm_time(text: str) -> int:
    """Return the seconds of a Slurm time limit, or of a duration with units as in `parse_duration`.

    Slurm's forms (sbatch(1), ``--time``): minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes and days-hours:minutes:seconds.

    Raises
    ------
    ValueError
        `text` has none of these forms, or minutes or seconds of 60 or more after a larger unit.
    """
    clock = re.fullmatch(_CLOCK, text.strip())
    if clock is None or not text.isascii():
        return _with_units(text.strip())
    days = clock[1]
    numbers = [int(group) for group in clock.groups()[1:] if group is not None]
    if any(number > 59 for number in numbers[1:]):
        raise ValueError(f"{text!r}: minutes and seconds after a colon go up to 59")
    if days is not None:
        hours, minutes, seconds = numbers + [0] * (3 - len(numbers))
        return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(numbers) == 3:
        return numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def format_slurm_time(seconds: int) -> str:
    """Return a duration as ``hours:minutes:seconds``, or ``days-hours:minutes:seconds`` from one day on."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}"
    return f"{days}-{clock}" if days else clock


def _with_units(text: str) -> int:
    text = text.lower()
    if not text.isascii() or not re.fullmatch(_PARTS, text):
        raise ValueError(f"{text!r} is not a duration")
    sizes = [_UNITS[unit] for _, unit in re.findall(_PART, text)]
    if sizes != sorted(set(sizes), reverse=True):
        raise ValueError(f"{text!r}: larger units come first, each once")
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(_PART, text))
