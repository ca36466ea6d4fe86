"""The causes of failures that tests make up."""

from __future__ import annotations

from typing import Any

from cluster_ddp.run.causes import cause_of_message, cause_of_signal


def with_cause(event: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a failure with its cause, as ranks and node programs record it, unless the test gives it."""
    error, killed = str(fields.get("error") or ""), fields.get("signal")
    if event not in ("failed", "rank-failed") or "cause" in fields or not (error or killed):
        return fields
    return {**fields, "cause": (cause_of_signal(killed, error) if killed else cause_of_message(error)).value}
