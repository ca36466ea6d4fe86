"""What a user should know about a run besides its state: warnings, and what failed in it."""

from __future__ import annotations

from cluster_ddp.run.causes import what_failed
from cluster_ddp.run.events import CHECKPOINT, CHECKPOINT_FAILED, START_REFUSED, WARNING
from cluster_ddp.run.history import Event, History
from cluster_ddp.run.reading import as_whole
from cluster_ddp.run.unfinished import failed_save, seconds_of_a_save, unfinished_saves
from cluster_ddp.words import moment

_MAX_WARNINGS = 10


def warnings_of(history: History) -> tuple[str, ...]:
    """Return what training warned about since the last `resume`, each text once, the latest last."""
    warned = [event for event in history.events if event["event"] in (WARNING, START_REFUSED)]
    current = [event for event in warned if (as_whole(event.get("attempt")) or 0) >= history.first_number]
    messages = [str(event.get("message")) for event in current if not _is_made_up_for(history, event)]
    if unfinished := unfinished_saves(history):
        messages.append(unfinished[-1].describe(seconds_of_a_save(history)))
    said = dict.fromkeys(reversed(messages))
    return (*_ran_on(history), *reversed(list(said)[:_MAX_WARNINGS]))


def _is_made_up_for(history: History, warned: Event) -> bool:
    """Whether a warning is about a save that failed, and another try in the same attempt did not."""
    number, message = as_whole(warned.get("attempt")), str(warned.get("message"))
    if number is None:
        return False
    saved = {event.get("step") for event in history.of_attempt(number, CHECKPOINT)}
    failed = (event for event in history.of_attempt(number, CHECKPOINT_FAILED) if event.get("step") in saved)
    return any(message.startswith(failed_save(event)) for event in failed)


def _ran_on(history: History) -> list[str]:
    """Name the nodes that kept running an attempt after a newer one had begun, which it could not prevent."""
    told = []
    for number, event in history.ran_on():
        until = moment(float(event["time"]))
        by_slurm = any(record.number == number and record.slurm_job_id for record in history.attempts)
        cut = ", cut from the controller" if by_slurm else ", beside a newer one"
        told.append(f"node {event.get('host')} still ran attempt {number} until {until}{cut}")
    return told


def last_failure(history: History) -> str | None:
    """Describe the last failure since the last `resume` with its attempt, rank, host and error; None without one."""
    for record in reversed(history.attempts):
        if record.number >= history.first_number and (failed := what_failed(history, record.number)):
            return f"attempt {record.number}: {failed}"
    return None
