"""Durations in people's and in Slurm's forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_ddp.job.units import format_slurm_time, parse_duration, parse_slurm_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30 * 60),
        ("30:15", 30 * 60 + 15),
        ("04:00:00", 4 * 3600),
        ("100:00:00", 100 * 3600),
        ("1-12", 36 * 3600),
        ("1-12:30", 36 * 3600 + 30 * 60),
        ("1-12:00:00", 36 * 3600),
        ("90m", 90 * 60),
        ("4h 30m", 4 * 3600 + 30 * 60),
        ("1d2h", 26 * 3600),
        ("90 min", 90 * 60),
    ],
)
def test_slurm_time(text: str, seconds: int) -> None:
    assert parse_slurm_time(text) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45", 45), ("90s", 90), ("10m", 600), ("1h 30m", 5400), ("1H30M", 5400), ("2d", 172800), ("5 sec", 5)],
)
def test_duration(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("parse", [parse_duration, parse_slurm_time])
@pytest.mark.parametrize(
    "text",
    [
        "banana",
        "",
        " ",
        "-5",
        "5x",
        "1m 1h",
        "1m 1m",
        "1.5h",
        "٣",
        "٣m",
        "1:2:3:4",
        "h",
        "0x10",
        "1e3",
        "4 h 30",
        "5m x",
    ],
)
def test_what_is_no_duration(parse: object, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)  # type: ignore[operator]


@pytest.mark.parametrize("text", ["01:60", "00:61:00", "1-1:99", "1-01:01:75"])
def test_sixty_minutes_behind_a_colon_are_a_slip(text: str) -> None:
    with pytest.raises(ValueError, match="up to 59"):
        parse_slurm_time(text)


@given(st.integers(0, 10**9))
def test_units_round_trip(seconds: int) -> None:
    assert parse_slurm_time(format_slurm_time(seconds)) == seconds


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    for parse in (parse_duration, parse_slurm_time):
        try:
            assert parse(text) >= 0
        except ValueError as error:
            assert str(error)
