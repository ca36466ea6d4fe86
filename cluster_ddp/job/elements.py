"""What is needed of a sweep's elements where neither pydantic nor YAML is loaded."""

from __future__ import annotations

MAX_ELEMENTS = 10_000  # of a sweep: Slurm's own default limit on jobs


def which_elements(numbers: list[int]) -> str:
    """The elements of a sweep that a message is about, by their numbers from 0."""
    return f"element {numbers[0]}" + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "")
