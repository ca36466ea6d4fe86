"""Rendering the batch script: one object, built once, which `--dry-run` prints and `submit` sends.

The script itself is `template.sbatch`, to be read there from top to bottom. What depends on the job stands in it as
``@mark@`` and is rendered here; every value of the job file passes through `quote`.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster_ddp.launch.torchrun import torchrun_command
from cluster_ddp.network import NetworkPlan, resolve
from cluster_ddp.slurm.quote import comment, directive, inside, quote, quote_around
from cluster_ddp.spec import ClusterDDPError, ContainerSpec, JobSpec
from cluster_ddp.spec.units import format_slurm_time

_TEMPLATE = Path(__file__).with_name("template.sbatch")
_MARK = re.compile(r"@([a-z]+)@")

# What only the running script knows stands in the torchrun line as a mark (see quote_around).
_VARIABLES = {
    "\0run\0": "$run",
    "\0nodes\0": "$SLURM_JOB_NUM_NODES",
    "\0id\0": "$SLURM_JOB_ID.$number",
    "\0endpoint\0": "$MASTER_ADDR:$MASTER_PORT",
}

FIRST_PORT = 20000
PORTS = 12768
"""MASTER_PORT is 20000 to 32767: above the well-known ports, below the ephemeral ones, any of which may be in use."""


@dataclass(frozen=True)
class BatchScript:
    """A rendered batch script.

    Attributes
    ----------
    text
        The whole script.
    remarks
        What a person should know about how the job file was read.
    """

    text: str
    remarks: tuple[str, ...] = ()


class ScriptError(ClusterDDPError):
    """The rendered script is no valid bash: a line of launch.setup breaks it."""


def render_script(spec: JobSpec, *, python: str | None = None) -> BatchScript:
    """Render the batch script of a job.

    The run directory is no part of it but its argument, so that the same text serves every run of the job.

    Parameters
    ----------
    spec
        The resolved job.
    python
        The interpreter on the nodes where ``launch.python`` names none. Default: the one that runs now, which has this
        package and lies on shared storage on most clusters; in a container, ``python3``.

    Raises
    ------
    NetworkError
        A network setting that would be ignored on the nodes.
    UnquotableError
        A value that sbatch cannot be given.
    """
    network = resolve(spec.network)
    launcher = _Launcher(spec, python)
    blocks = {
        "title": "# " + _title(spec),
        "directives": "\n".join(_directives(spec)),
        "setup": "\n".join(_setup(spec)),
        "python": "\n".join(launcher.definitions()),
        "here": launcher.here,
        "signal": spec.requeue.signal,
        "port": _port(spec),
        "network": "\n".join(_exports(spec, network)),
        "srun": launcher.step(),
    }
    text = _MARK.sub(lambda mark: blocks[mark[1]], _TEMPLATE.read_text())
    return BatchScript(re.sub(r"\n{3,}", "\n\n", text), network.remarks)


def check_syntax(script: BatchScript) -> None:
    """Let bash parse the script, without running it: an unclosed quote in launch.setup shows now and not in the queue.

    Raises
    ------
    ScriptError
        bash cannot parse it; the message holds bash's words.
    """
    import subprocess

    done = subprocess.run(["bash", "-n"], input=script.text, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise ScriptError(f"launch.setup makes the batch script invalid: {done.stderr.strip()}")


def job_options(spec: JobSpec) -> dict[str, str | None]:
    """What the job asks of Slurm, as options of sbatch in the order of the script; None: an option without a value."""
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
            options["gres"] = f"{options['gres']},{setting}"  # sbatch takes the last --gres only
        elif setting is not False:
            options[name] = None if setting in (None, True) else str(setting)
    return options


def _title(spec: JobSpec) -> str:
    ranks = spec.procs_per_node
    return (
        f"{spec.name}: {spec.slurm.nodes} node{'s' * (spec.slurm.nodes > 1)} with {ranks} rank{'s' * (ranks > 1)} "
        f"each, training {comment(spec.task or spec.script or '')}"
    )


def _directives(spec: JobSpec) -> Iterator[str]:
    for option, value in job_options(spec).items():
        yield directive(option, value)
    yield "# The output of all attempts in one file; a requeued attempt would else overwrite the one before."
    yield directive("output", "slurm-%j.out")
    yield directive("open-mode", "append")
    yield f"# This shell (B:) is told {spec.requeue.warning} s before the time limit, and the job may be started again."
    yield directive("signal", f"B:{spec.requeue.signal}@{spec.requeue.warning}")
    yield directive("requeue" if spec.requeue.max_requeues else "no-requeue", None)


def _setup(spec: JobSpec) -> Iterator[str]:
    if not spec.launch.setup:
        return
    yield "# launch.setup of the job file, each line as it stands there."
    yield "checked() {"
    yield "    local status=$?"
    yield '    ((status == 0)) || fail "launch.setup: status $status from: $1"'
    yield "}"
    for line in spec.launch.setup:
        yield line
        yield f"checked {quote(line)}"
    yield "set +eu +o pipefail # whatever those lines have set: this script looks at each status itself"
    yield ""


def _port(spec: JobSpec) -> str:
    if spec.launch.port != "auto":
        return f"MASTER_PORT={spec.launch.port}"
    return (
        "# Another port for each job on a node, below the ephemeral ones (32768 and up), which anybody may hold.\n"
        f"MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"
    )


def _exports(spec: JobSpec, network: NetworkPlan) -> Iterator[str]:
    yield f"# The network, by profile {spec.network.profile}. A node's environment report has what was in force there."
    for setting in network.settings:
        yield f"export {setting.name}={quote(setting.value)} # {comment(setting.why)}"


class _Launcher:
    """How python is started on the batch host and on the nodes: bare, or in a container."""

    def __init__(self, spec: JobSpec, python: str | None) -> None:
        self._spec = spec
        self._container = spec.launch.container
        self._python = spec.launch.python or python or (sys.executable if self._container is None else "python3")
        pyxis = self._container is not None and self._container.runtime == "pyxis"
        # Pyxis enters containers through srun only.
        self._srun_options = _pyxis_options(self._container) if self._container is not None and pyxis else ""
        self.here = ('"${once[@]}" ' if pyxis else "") + '"${python[@]}"'

    def definitions(self) -> Iterator[str]:
        """The lines that define the array `python`, and for Pyxis `once`."""
        yield "# The interpreter that has cluster_ddp; the ranks run in it, too."
        yield f"python=({self._prefix()}{quote(self._python)})"
        if self._srun_options:
            yield f"once=(srun --overlap --nodes=1 --ntasks=1{self._srun_options})"

    def step(self) -> str:
        """The srun command, over several lines, without the & behind it."""
        command = torchrun_command(
            self._spec,
            run_directory="\0run\0",
            nodes="\0nodes\0",
            procs=self._spec.procs_per_node,
            rdzv_id="\0id\0",
            endpoint="\0endpoint\0",
        )
        options = list(itertools.takewhile(lambda word: word.startswith("--"), command[1:]))
        target = command[1 + len(options) :]  # what is run, and options of its own behind it
        lines = [
            f"srun --export=ALL --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0{self._srun_options}",
            '    "${python[@]}" -m cluster_ddp.launch.node --run "$run" --attempt "$number" --',
            f"    {command[0]}",
            *(f"        {quote_around(option, _VARIABLES)}" for option in options),
            f"        {' '.join(quote_around(word, _VARIABLES) for word in target)}",
        ]
        return " \\\n".join(lines)

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


def _pyxis_options(container: ContainerSpec) -> str:
    mounts = "".join("," + inside(mount) for mount in container.mounts)
    return f' --container-image={quote(container.image)} --container-mounts="$run:$run{mounts}"'
