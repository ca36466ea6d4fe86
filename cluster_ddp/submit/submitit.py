"""Submitting with submitit: the same job file, keeper and node program, started by submitit's executors.

On Slurm, submitit's script runs the keeper as our own does: without an srun around it, by ``exec``, and with the
warning signal sent to the batch process (B:), so that the keeper is lost only with the batch host.

submitit pickles only the run directory's name, in a folder of the run that only its owner can open. submitit imports
much, so it is imported only when it is used.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.network import resolve
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import add_slurm_job, announce_submission, slurm_comment, update_record
from cluster_ddp.run.runs import keep_script
from cluster_ddp.run.storage import Storage
from cluster_ddp.run.via import SUBMITIT
from cluster_ddp.slurm.commands import SlurmError, SubmissionUnclear, may_be_queued
from cluster_ddp.slurm.environment import environment_for
from cluster_ddp.submit.base import SubmitError
from cluster_ddp.submit.preamble import IGNORE_SIGNALS, hand_over, interpreter_check, preamble
from cluster_ddp.submit.quote import quote
from cluster_ddp.submit.script import check_before_sending, job_options, own_comment
from cluster_ddp.submit.submitit_job import SubmititJob, warning_name

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec

_NO_LIMIT_MINUTES = 365 * 24 * 60
"""The time given to submitit's local executor where the job file sets none: it needs a number."""


class SubmititSubmission:
    """A job for submitit: its Slurm executor if there is Slurm, else its local one."""

    via = SUBMITIT

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.remarks = resolve(spec.network, os.environ).remarks

    @property
    def to_slurm(self) -> bool:
        return shutil.which("sbatch") is not None and shutil.which("srun") is not None

    @property
    def batch_script(self) -> str:
        """Return the batch script that submitit will write, with a placeholder for the run directory."""
        from submitit.slurm.slurm import _make_sbatch_string

        folder = Path("RUN_DIRECTORY/submitit")
        command = f"{self._batch_python()} -u -m submitit.core._submit {shlex.quote(str(folder))}"
        return str(_make_sbatch_string(command=command, folder=folder, **self._slurm_parameters(None)))

    def check(self) -> None:
        spec = self._spec
        check_before_sending(spec)
        if spec.launch.container is not None:
            raise SubmitError("launch.container needs --via sbatch: submitit starts its own python on the nodes.")
        if self.to_slurm:
            if spec.slurm.time is None:
                raise SubmitError("--via submitit needs slurm.time: submitit would ask for 5 minutes without it.")
        elif spec.slurm.nodes > 1:
            raise SubmitError(
                f"There is no Slurm here, and submitit's local executor has one node, not {spec.slurm.nodes}.\n"
                "Give --set slurm.nodes=1, or run it with: cluster-ddp local"
            )

    def send(self, run: RunDirectory) -> str | None:
        """Submit; return the Slurm job id, or None from the local executor."""
        folder = run.path / "submitit"
        folder.mkdir(mode=0o700, exist_ok=True)
        if self.to_slurm:
            return self._send_to_slurm(run, folder)
        self._send_to_local(run, folder)
        update_record(run, submitting=None)  # there will be no Slurm job
        return None

    def _send_to_slurm(self, run: RunDirectory, folder: Path) -> str:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        executor = submitit.SlurmExecutor(
            folder=folder, python=self._batch_python(), max_num_timeout=self._spec.requeue.max_requeues
        )
        executor.update_parameters(**self._slurm_parameters(run))
        announce_submission(run)
        try:
            # A newer version of this package than the run was made with may have other files beside the script
            keep_script(Storage(), run.script, self.batch_script, mode=run.script_mode())
            with _environment(environment_for(self.batch_script)):
                job = executor.submit(SubmititJob(str(run.path)))
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            update_record(run, submitting={})  # it may be in the queue nevertheless
            unclear = isinstance(error, FailedSubmissionError) or may_be_queued(str(error))
            kind = SubmissionUnclear if unclear else SlurmError
            raise kind(f"submitit could not submit: {error}") from error
        add_slurm_job(run, str(job.job_id))
        return str(job.job_id)

    def _send_to_local(self, run: RunDirectory, folder: Path) -> None:
        import submitit

        spec = self._spec
        minutes = spec.slurm.time / 60 if spec.slurm.time is not None else _NO_LIMIT_MINUTES
        executor = submitit.LocalExecutor(
            folder=folder, python=self._python(), max_num_timeout=spec.requeue.max_requeues
        )
        executor.update_parameters(
            timeout_min=minutes,
            gpus_per_node=spec.slurm.gpu_count,
            signal_delay_s=spec.requeue.warning,
            setup=list(spec.launch.setup),
        )
        # The controller outlives this process. It must not keep open a pipe that somebody reads to its end.
        with _output_to(folder / "controller.log"):
            executor.submit(SubmititJob(str(run.path)))

    def _slurm_parameters(self, run: RunDirectory | None) -> dict[str, Any]:
        spec = self._spec
        options = {name: True if value is None else value for name, value in job_options(spec).items()}
        for name in ("job-name", "nodes", "ntasks-per-node"):
            del options[name]  # submitit has parameters for these
        folder = "RUN_DIRECTORY" if run is None else quote(str(run.path))
        if run is not None:
            options["comment"] = f"{slurm_comment(run.id)}{own_comment(spec)}"
        return {
            "job_name": spec.name,
            "nodes": spec.slurm.nodes,
            "ntasks_per_node": 1,
            "time": math.ceil((spec.slurm.time or 60) / 60),
            "setup": [
                *preamble(spec, signal=warning_name(), run=folder, setup="\n".join(spec.launch.setup)),
                *interpreter_check(self._python(), "cluster_ddp, submitit"),
                IGNORE_SIGNALS,
            ],
            "use_srun": False,
            "stderr_to_stdout": True,
            "additional_parameters": {
                "requeue" if spec.requeue.max_requeues else "no-requeue": True,
                **options,
                "signal": f"B:{warning_name()}@{spec.requeue.warning}",
            },
        }

    def _batch_python(self) -> str:
        return f"{hand_over(self._spec)} {self._python()}"

    def _python(self) -> str:
        return shlex.quote(self._spec.launch.python or sys.executable)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Make submitit call sbatch in a modified environment, which cannot be passed as an argument."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Make processes started meanwhile write to a file instead of our standard output and error."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (*saved, target):
            os.close(descriptor)
