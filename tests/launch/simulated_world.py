"""What happens around one start of a simulated job, and what Slurm tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.slurm.job_info import JobInfo, parse_job

KILL_WAIT = 30.0
# What happens to a start, and after how many seconds of its life Slurm kills it for that: None for not at all.
KILLS: dict[str, float | None] = {
    "warning": None,  # the signal ahead of the time limit
    "kill -USR2": None,  # by somebody, or by a site whose warning it is
    "kill -QUIT": None,
    "kill -ALRM": None,
    "kill -INT": None,  # by somebody, who wants it to end
    "time limit": KILL_WAIT,
    "preemption": KILL_WAIT,  # which the job has to answer by itself
    "scancel": KILL_WAIT,
    "kill -TERM": None,  # by somebody
    "TERM to the step": None,  # scancel --signal=TERM
    "requeue by Slurm": KILL_WAIT,  # a node failed, or an administrator asked
    "node down": KILL_WAIT,  # of a job that Slurm may not queue again
    "stop": None,  # `cluster-ddp stop`
    "second start": None,  # on other nodes, while this one trains
    "another job": None,  # of the same run: by hand, or of a chain
}
_BY_SLURM = ("preemption", "time limit")


@dataclass(frozen=True)
class Life:
    """What happens in one start of the job.

    Attributes
    ----------
    events
        Seconds, and a word of `KILLS`, in order.
    training
        How it ends when nothing asks it to stop: "completes", "crashes", "is killed" (a rank), "dies" (silently).
    lasts
        Seconds until then.
    saves_in
        Seconds that it takes to save and end when it is asked to; None: it hangs.
    answers
        What becomes of each question about the job: "ok", "late", "half" of a line, "none"; after these, "ok".
    requeues
        What becomes of each requeue: "ok", "unheard" (accepted, but nobody hears of it), "away", "refused"; then "ok".
    silent
        Seconds from and until which no question is answered; what is asked for is done all the same.
    latency
        Seconds after which Slurm hears of what it is asked, or told to do.
    limit
        Seconds until the end of the time limit as it was last heard; it may have been changed. None without one.
    """

    events: tuple[tuple[float, str], ...] = ()
    training: str = "completes"
    lasts: float = 100.0
    saves_in: float | None = 5.0
    answers: tuple[str, ...] = ()
    requeues: tuple[str, ...] = ()
    silent: tuple[float, float] = (0.0, 0.0)
    latency: float = 0.0
    limit: float | None = None


@dataclass
class World:
    """One start of the job and what surrounds it."""

    run: RunDirectory
    restart: int
    life: Life
    now: float = 0.0
    queued: bool = False  # again: by the keeper, or by Slurm itself
    left_queue: bool = False  # taken out of it by the keeper
    faults: list[str] = field(default_factory=list)  # what must never happen, and did

    def __post_init__(self) -> None:
        # Slurm neither preempts nor ends at its time limit what it has cancelled.
        over = next((at for at, word in self.life.events if word == "scancel"), float("inf"))
        events = [(at, word) for at, word in self.life.events if at < over or word not in _BY_SLURM]
        self.life = replace(self.life, events=tuple(events))
        self.answers, self.requeues = list(self.life.answers), list(self.life.requeues)

    def happened(self, *words: str) -> float | None:
        """When the first of these came; None when none has come yet."""
        return next((at for at, word in self.life.events if word in words and at <= self.now), None)

    @property
    def killed_at(self) -> float | None:
        kills = [at + wait for at, word in self.life.events if at <= self.now and (wait := KILLS[word]) is not None]
        return min(kills, default=None)

    def shown(self) -> JobInfo | None:
        """The job as ``scontrol show job`` tells it now."""
        reasons = {"time limit": "TimeLimit", "node down": "NodeDown"}
        reason = next((reason for word, reason in reasons.items() if self.happened(word) is not None), "None")
        preempted = "2026-11-20T11:08:11" if self.happened("preemption") is not None else "None"
        ending = any(self.happened(word) is not None for word, kill in KILLS.items() if kill is not None)
        again = self.queued or self.happened("requeue by Slurm", "second start") is not None
        line = (
            f"JobId=77 JobState={'COMPLETING' if ending else 'RUNNING'} Reason={reason} Requeue=1 "
            f"Restarts={self.restart + again}"
        )
        return parse_job(line + ("" if again else f" PreemptTime={preempted}"))

    def check_requeue(self) -> None:
        """The keeper has had the job queued again. A cancel of a job that Slurm ends already does not show."""
        ending = self.happened("time limit", "preemption")
        for word in ("scancel", "stop", "second start"):
            at = self.happened(word)
            if at is not None and at < self.now and not (word == "scancel" and ending is not None and ending <= at):
                self.faults.append(f"queued again at {self.now:.0f} s, {word} came at {at:.0f} s")
        self.queued = True
