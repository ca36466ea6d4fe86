"""The part of a sweep's elements that needs neither pydantic nor YAML."""

from __future__ import annotations

MAX_ELEMENTS = 10_000  # per sweep: Slurm's own default limit on jobs


def which_elements(numbers: list[int]) -> str:
    """Name the elements of a sweep that a message is about, by their numbers from 0."""
    return f"element {numbers[0]}" + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "")
