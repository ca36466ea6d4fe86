"""Renders the batch script, once: `--dry-run` prints the same object that `submit` sends.

The script itself is `template.sbatch`, which can be read from top to bottom. Parts that depend on the job are
``@mark@`` there and are rendered here; every value of the job file passes through `quote`.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_ddp.exit_statuses import RUN_ENDED
from cluster_ddp.job import ClusterDDPError, ContainerSpec, JobSpec
from cluster_ddp.job.units import format_slurm_time
from cluster_ddp.launch.keeper.job_step import ATTEMPT, PORT, SRUN, node_program
from cluster_ddp.launch.torchrun.command import torchrun_command
from cluster_ddp.network import NetworkPlan, resolve
from cluster_ddp.run.runs import runs_dir_of
from cluster_ddp.submit.preamble import IGNORE_SIGNALS, hand_over, interpreter_check, preamble
from cluster_ddp.submit.quote import comment, directive, inside, quote, quote_around

_TEMPLATE = Path(__file__).with_name("template.sbatch")
_MARK = re.compile(r"@([a-z_]+)@")

# What only the running script knows is a mark in the commands of the nodes (see quote_around).
_VARIABLES = {
    "\0python\0": "${python[@]}",
    "\0run\0": "$run",
    "\0nodes\0": "$SLURM_JOB_NUM_NODES",
    "\0id\0": "$SLURM_JOB_ID",
    "\0addr\0": "$MASTER_ADDR",
    "\0port\0": "$MASTER_PORT",
    "\0args\0": "${args[@]}",
}

_SETUP_HERE = "\0setup\0"
_GIVEN_RUN = '${1:+$(realpath -m -- "$1")}'
_GIVEN_SWEEP = """cluster_ddp_sweep=
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then # one element of the sweep $1; $2 is the element that is task 0
    cluster_ddp_sweep=$cluster_ddp_run
    cluster_ddp_element=$((SLURM_ARRAY_TASK_ID + ${2:-0}))
    printf -v cluster_ddp_run '%s/%04d' "$cluster_ddp_sweep" "$cluster_ddp_element"
    cluster_ddp_made=("$cluster_ddp_run"-*/) # at the first start; the name shows what differs
    cluster_ddp_run=${cluster_ddp_made[0]%/}
fi"""
_RUN_OF_ELEMENT = """if [[ -n $cluster_ddp_sweep ]]; then
    run=$(@keeper@ -m cluster_ddp.submit.element "$cluster_ddp_sweep" "$cluster_ddp_element") || {
        if (($? == @ended@)); then # the sweep was stopped or cancelled before; RequeueExit must not undo that
            timeout 60 scontrol update JobId="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" Requeue=0
            exit @ended@
        fi
        cluster_ddp_fail again "element $cluster_ddp_element of $cluster_ddp_sweep has no run"
    }
    cluster_ddp_run=$run
    exec >>"$run/slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out" 2>&1 # no longer into the file that all share
fi"""


@dataclass(frozen=True)
class BatchScript:
    """A rendered batch script, and remarks for the user about how the job file was interpreted."""

    text: str
    remarks: tuple[str, ...] = ()


class ScriptError(ClusterDDPError):
    """launch.setup is not valid bash, and would break the script."""


def render_script(
    spec: JobSpec,
    *,
    python: str | None = None,
    own_run_of: str | None = None,
    sweep: bool = False,
    exported: Mapping[str, str] | None = None,
) -> BatchScript:
    """Render the batch script of a job.

    The run directory is not part of it but its argument, so that the same text serves every run of the job.

    Parameters
    ----------
    python
        The interpreter with this package, on the nodes if ``launch.python`` names none, and on the batch host of a job
        in a container. Default: the one running now, which is on shared storage on most clusters.
    own_run_of
        A job file or template's name. With it the script may be submitted without a run directory: it makes a run of
        that job, and finds it again when Slurm restarts it.
    sweep
        Whether it is submitted as an array, too: then its arguments are the folder of a sweep and the element that is
        task 0, and each task makes the run of its element. The script does not contain what differs between elements.
    exported
        The environment that it is submitted in, if known. The script does not depend on it; the remarks do.

    Raises
    ------
    NetworkError
        A network setting would be ignored on the nodes.
    UnquotableError
        A value cannot be passed to sbatch.
    """
    network = resolve(spec.network)
    launcher = _Launcher(spec, python, sweep=sweep)
    given = f"{_GIVEN_RUN}\n{_GIVEN_SWEEP}" if sweep else _GIVEN_RUN
    beside = "${cluster_ddp_sweep:-$cluster_ddp_run}" if sweep else "$cluster_ddp_run"
    blocks = {
        "title": "# " + _title(spec),
        "usage": _usage(own_run_of, sweep=sweep),
        "directives": "\n".join(_directives(spec)),
        "preamble": "\n".join(preamble(spec, signal=spec.requeue.signal, run=given, setup=_SETUP_HERE, beside=beside)),
        "interpreter": "\n".join(launcher.definitions()),
        "keeper": launcher.keeper,
        "check_interpreter": "\n".join(interpreter_check(launcher.keeper, "cluster_ddp")),
        "ignore_signals": IGNORE_SIGNALS,
        "hand_over": hand_over(spec),
        "run_directory": "\n".join(
            [*_run_directory(own_run_of, launcher.keeper, sweep=sweep), *launcher.definitions_from_run()]
        ),
        "signal": spec.requeue.signal,
        "endpoint": _export_endpoint(spec),
        "network": "\n".join(_exports(spec, network)),
        "job_step": launcher.step(),
    }
    text = _MARK.sub(lambda mark: blocks[mark[1]], _TEMPLATE.read_text())
    text = re.sub(r"\n{3,}", "\n\n", text).replace(_SETUP_HERE, "\n".join(spec.launch.setup))  # keeps its empty lines
    return BatchScript(text, resolve(spec.network, exported).remarks)


def check_before_sending(spec: JobSpec) -> None:
    """Raise a `ScriptError` for what would otherwise fail only once Slurm starts the job.

    Bash parses launch.setup without running it, so that an unclosed quote is noticed.
    """
    import subprocess

    runs_dir = str(runs_dir_of(spec))
    if "\\" in runs_dir:
        raise ScriptError(f"runs_dir: {runs_dir} contains a backslash, which sbatch does not accept in --output")
    lines = "\n".join([*spec.launch.setup, ""])
    done = subprocess.run(["bash", "-n"], input=lines, capture_output=True, text=True, timeout=20, cwd="/")
    if done.returncode != 0 or done.stderr.strip():  # about an open heredoc bash only warns
        raise ScriptError(f"launch.setup is not valid bash: {done.stderr.strip()}")


def job_options(spec: JobSpec) -> dict[str, str | None]:
    """Return what the job requests from Slurm, as sbatch options in the script's order; None: without a value."""
    slurm = spec.slurm
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    asked = {
        "job-name": spec.name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "nodes": str(slurm.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": f"{kind}{slurm.gpu_count}"
        if slurm.gpu_count and slurm.gpu_option == "gpus-per-node"
        else None,
        "gres": f"gpu:{kind}{slurm.gpu_count}" if slurm.gpu_count and slurm.gpu_option == "gres" else None,
        "cpus-per-task": str(slurm.cpus_per_task) if slurm.cpus_per_task is not None else None,
        "mem": slurm.mem,
        "time": format_slurm_time(slurm.time) if slurm.time is not None else None,
        "constraint": slurm.constraint,
        "nodelist": slurm.nodelist,
        "exclude": slurm.exclude,
    }
    options: dict[str, str | None] = {name: value for name, value in asked.items() if value is not None}
    for name, setting in slurm.extra.items():
        if name == "gres" and "gres" in options:
            options["gres"] = f"{options['gres']},{setting}"  # sbatch uses only the last --gres
        elif setting is not False:
            options[name] = None if setting is None or setting is True else str(setting)  # `is True`, as 1 equals True
    return options


def own_comment(spec: JobSpec) -> str:
    """Return the job file's comment (``slurm.extra.comment``), to follow ours, which says whose job it is."""
    wanted = spec.slurm.extra.get("comment")
    return f" {wanted}" if isinstance(wanted, str) and wanted else ""


def _usage(own_run_of: str | None, *, sweep: bool) -> str:
    """Return how the script is submitted."""
    if sweep:
        return "--array=FIRST-LAST job.sbatch SWEEP OFFSET   (or, for one run of it: sbatch job.sbatch RUN_DIRECTORY)"
    return "job.sbatch RUN_DIRECTORY" if own_run_of is None else f"{own_run_of}.sbatch [RUN_DIRECTORY]"


def _title(spec: JobSpec) -> str:
    nodes, ranks = spec.slurm.nodes, spec.procs_per_node
    return (
        f"{spec.name}: {nodes} node{'s' * (nodes > 1)} with {ranks} rank{'s' * (ranks > 1)}{' each' * (nodes > 1)}, "
        f"training {comment(spec.task or spec.script or '')}"
    )


def _directives(spec: JobSpec) -> Iterator[str]:
    for option, value in job_options(spec).items():
        yield directive(option, value)
    yield "# The output of all attempts in one file; a requeued attempt would otherwise overwrite it."
    yield directive("output", "slurm-%j.out")
    yield directive("open-mode", "append")
    yield f"# This shell (B:) is signalled {spec.requeue.warning} s before the time limit, and the job may start again."
    yield directive("signal", f"B:{spec.requeue.signal}@{spec.requeue.warning}")
    if not spec.requeue.max_requeues:
        yield directive("no-requeue", None)
    elif "requeue" not in spec.slurm.extra:
        yield directive("requeue", None)


def _run_directory(own_run_of: str | None, keeper: str, *, sweep: bool) -> Iterator[str]:
    """Yield the lines that set `run`, the run directory."""
    if own_run_of is None:
        yield "[[ -n $cluster_ddp_run ]] ||"
        yield '    cluster_ddp_fail once "the run directory is missing: sbatch job.sbatch RUN_DIRECTORY"'
        yield "run=$cluster_ddp_run"
        if sweep:
            yield _RUN_OF_ELEMENT.replace("@keeper@", keeper).replace("@ended@", str(RUN_ENDED))
    else:
        yield "# Without a run directory, this job creates its own run and finds it again at each restart."
        yield "# What to run: a job file or a template, and settings that override it, such as --set train.epochs=3."
        yield f"job=({quote(own_run_of)})"
        yield f'run=${{cluster_ddp_run:-$({keeper} -m cluster_ddp.submit.own_run "$0" "${{job[@]}}")}}'
        yield '[[ -n $run ]] || cluster_ddp_fail once "there is no run directory, so there is nothing to train"'
        yield 'run=$(realpath -- "$run")'
        yield "cluster_ddp_run=$run"
    yield '[[ -f $run/job.yaml ]] || cluster_ddp_fail once "$run is not a run directory: it has no job.yaml"'
    if own_run_of is not None:
        yield 'exec >>"$run/slurm-$SLURM_JOB_ID.out" 2>&1 # where `cluster-ddp status` looks for it'


def _export_endpoint(spec: JobSpec) -> str:
    if spec.launch.fixed_port is None:
        return "export MASTER_ADDR"
    return f"export MASTER_ADDR MASTER_PORT={spec.launch.fixed_port}"


def _exports(spec: JobSpec, network: NetworkPlan) -> Iterator[str]:
    yield f"# The network, by profile {spec.network.profile}. Exported values override defaults, not the job's keys."
    yield "# The environment report of a node shows what was in effect there."
    for setting in network.settings:
        value = quote(setting.value) if setting.explicit else f'"${{{setting.name}:-{inside(setting.value)}}}"'
        yield f"export {setting.name}={value} # {comment(setting.why)}"


class _Launcher:
    """How python is started on the nodes, bare or in a container, and on the batch host, where the keeper runs.

    The keeper stays outside of containers: inside it would find no scontrol to request a requeue.
    """

    def __init__(self, spec: JobSpec, python: str | None, *, sweep: bool) -> None:
        self._spec = spec
        self._sweep = sweep
        self._container = spec.launch.container
        self._host_python = python or sys.executable
        self._python = spec.launch.python or (self._host_python if self._container is None else "python3")
        pyxis = self._container is not None and self._container.runtime == "pyxis"
        # Pyxis enters containers only through srun.
        self._srun_options = _pyxis_options(self._container) if self._container is not None and pyxis else ""
        self.keeper = '"${python[@]}"' if self._container is None else '"$host_python"'

    def definitions(self) -> Iterator[str]:
        """Yield the lines that define the array `python`, and `host_python` if ranks run in a container."""
        if self._container is None:
            yield "# The interpreter that has cluster_ddp; the ranks use it too."
            yield f"python=({quote(self._python)})"
            return
        yield "# The interpreter outside of the container needs cluster_ddp, but no torch."
        yield f"host_python={quote(self._host_python)}"

    def definitions_from_run(self) -> Iterator[str]:
        """Yield the lines that define what depends on the run directory.

        That is the array `args` of a script whose arguments may differ in a sweep, and the array `python` if ranks run
        in a container, which mounts the directory.
        """
        if self._sweep and self._spec.script is not None:
            yield "# The arguments of the script, by the run's own job file: they may differ from element to element."
            yield f"mapfile -t -d '' args < <({self.keeper} -m cluster_ddp.submit.element --arguments \"$run\")"
        if self._container is not None:
            yield f"python=({self._prefix()}{quote(self._python)})"

    def step(self) -> str:
        """Return the srun command, over several lines."""
        command = torchrun_command(
            self._spec,
            run_directory="\0run\0",
            nodes="\0nodes\0",
            procs=self._spec.procs_per_node,
            rdzv_id="\0id\0." + ATTEMPT,
            endpoint="\0addr\0:" + (PORT if self._spec.launch.fixed_port is None else "\0port\0"),
        )
        options = list(itertools.takewhile(lambda word: word.startswith("--"), command[1:]))
        target = command[1 + len(options) :]  # what is run, followed by its own options
        if self._sweep and self._spec.script is not None:
            target = [target[0], "\0args\0"]
        node = node_program("\0python\0", "\0run\0", ())
        lines = [
            f"{' '.join(SRUN)}{self._srun_options}",
            f"    {_words(node)}",
            f"    {command[0]}",
            *(f"        {_words([option])}" for option in options),
            f"        {_words(target)}",
        ]
        return " \\\n    ".join(lines)

    def _prefix(self) -> str:
        container = self._container
        if container is None or container.runtime == "pyxis":
            return ""
        image = quote(container.image)
        if container.runtime == "enroot":
            mounts = "".join(f" --mount {quote(mount)}" for mount in container.mounts)
            return f'enroot start --rw --mount "$run:$run"{mounts} {image} '
        gpus = " --nv" if self._spec.slurm.gpu_count else ""
        mounts = "".join(f" --bind {quote(mount)}" for mount in container.mounts)
        return f'apptainer exec{gpus} --bind "$run"{mounts} {image} '


def _words(words: Iterable[str]) -> str:
    """Return words of a command for the script, in which marks become expansions."""
    return " ".join(quote_around(word, _VARIABLES) for word in words)


def _pyxis_options(container: ContainerSpec) -> str:
    mounts = "".join("," + inside(mount) for mount in container.mounts)
    return f' --container-image={quote(container.image)} --container-mounts="$run:$run{mounts}"'
