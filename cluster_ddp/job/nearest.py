"""Suggests what the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(text: str, choices: Iterable[str]) -> str | None:
    """Return the choice whose spelling is closest to `text`, or that abbreviates it; `None` if there is none."""
    from difflib import get_close_matches  # needed only if something is wrong

    alike = {choice.lower(): choice for choice in choices}
    initials = "".join(word[:1] for word in text.lower().replace("-", "_").split("_"))  # learning_rate: lr
    if len(initials) > 1 and initials in alike:
        return alike[initials]
    found = get_close_matches(text[:80].lower().replace("-", "_"), alike, n=1, cutoff=0.6)
    found = found or get_close_matches(text[:80].lower(), alike, n=1, cutoff=0.6)
    return alike[found[0]] if found else None
