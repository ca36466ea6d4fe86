"""Concluding an attempt, and the digest: selecting the events to keep, so that every question can still be answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator

from cluster_ddp.run import node_outcome
from cluster_ddp.run.attempt_record import end_attempt, list_attempts, read_attempt
from cluster_ddp.run.causes import cause_of_hang, causes_of
from cluster_ddp.run.digest import Digest
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.events import (
    FAILED,
    HANG,
    NODE_FAILED,
    NODE_FINISHED,
    NODE_STARTED,
    RANK_FAILED,
    RESUMED,
    STARTED,
    STOP_REQUESTED,
    WARNING,
    read_whole_events,
)
from cluster_ddp.run.history import Event
from cluster_ddp.run.reading import as_number, as_whole
from cluster_ddp.run.storage import Storage, replace_file

_FAILURES = (FAILED, RANK_FAILED, NODE_FAILED)
_KEPT_FAILURES = 20  # of an attempt, besides the decisive ones
_OF_MANY = (*_FAILURES, NODE_STARTED, NODE_FINISHED, STOP_REQUESTED, HANG, WARNING)


def conclude(attempt: AttemptDirectory) -> str | None:
    """Record that an attempt is over, and write the run's digest; return why that failed, for people, else None."""
    try:
        end_attempt(attempt)
        write_digest(attempt.run)
    except OSError as error:
        what = f"the end of attempt {attempt.number} cannot be recorded in {attempt.record_file}"
        return f"{what}: {error.strerror or error}"
    return None


def write_digest(run: RunDirectory) -> None:
    """Summarize the events of attempts that are over. If it cannot be written, everything works without it."""
    attempts = [read_attempt(attempt) for attempt in list_attempts(run)]
    over = {record.number for record in attempts if record.ended is not None or record is not attempts[-1]}
    found = read_whole_events(run)
    digest = Digest(tuple(condense(found.events, over)), found.places)
    with contextlib.suppress(OSError):
        replace_file(Storage(), run.digest_file, json.dumps(digest.to_json()).encode())


def condense(events: Iterable[Event], over: set[int]) -> Iterator[Event]:
    """Yield the events that matter, in order; all events of attempts that are not over."""
    listed = list(events)
    many: dict[int, list[Event]] = {}
    for event in listed:
        if event.get("attempt") in over and (event["event"] in _OF_MANY or event["event"] in (STARTED, RESUMED)):
            many.setdefault(event["attempt"], []).append(event)
    kept = {id(event) for of_attempt in many.values() for event in _kept(of_attempt)}
    for event in listed:
        if event.get("attempt") not in over or event["event"] not in _OF_MANY or id(event) in kept:
            yield event


def _kept(events: list[Event]) -> Iterator[Event]:
    yield from _kept_failures(events)
    yield from _kept_nodes(events)
    yield from _kept_stops([event for event in events if event["event"] == STOP_REQUESTED])
    if hangs := [event for event in events if event["event"] == HANG]:
        yield from (*_ends(hangs), cause_of_hang(hangs))
    said: dict[str, Event] = {}
    for event in events:
        if event["event"] == WARNING:
            said[str(event.get("message"))] = event
    yield from said.values()


def _kept_failures(events: list[Event]) -> Iterator[Event]:
    """Yield the possible causes, in the whole attempt and since its ranks last started, and a few more."""
    failures = [event for event in events if event["event"] in _FAILURES]
    last_start = max((i for i, event in enumerate(events) if event["event"] in (STARTED, RESUMED)), default=-1)
    for some in (failures, [event for event in events[last_start + 1 :] if event["event"] in _FAILURES]):
        yield from (*causes_of(some), *some[:_KEPT_FAILURES], *sorted(some, key=_step)[-1:])


def _kept_nodes(events: list[Event]) -> Iterator[Event]:
    """Yield one node for all that began and ended normally, and each one that did not."""
    finished = [event for event in events if event["event"] == NODE_FINISHED]
    yield from [event for event in events if event["event"] == NODE_STARTED][:1]
    yield from node_outcome.not_signed_off(events)
    yield from (event for event in finished if event.get("outcome") == node_outcome.SUPERSEDED)
    yield from (*_ends(finished), *_ends(sorted(finished, key=_step)))


def _kept_stops(events: list[Event]) -> Iterator[Event]:
    """Yield the first and last stop requests, those that state a grace, and training's own events (without a node)."""
    yield from (event for event in events if event.get("node") is None)
    yield from _ends([event for event in events if event.get("by")])
    yield from _ends([event for event in events if as_number(event.get("grace")) is not None])


def _ends(events: list[Event]) -> list[Event]:
    return [*events[:1], *events[-1:]]


def _step(event: Event) -> int:
    return as_whole(event.get("step")) or 0
