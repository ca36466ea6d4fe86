"""The typed job: what a job file may contain, its defaults, and which settings exclude each other.

All models are frozen and refuse unknown keys. Durations are whole seconds. Paths are absolute once `load_job` has made
them so. The sections mirror the job file: ``spec.slurm.nodes`` is the key ``nodes`` under ``slurm:``.
"""

# No "from __future__ import annotations" here: pydantic would evaluate each annotation from its source, at every start.
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster_ddp.job import fields, options
from cluster_ddp.job.fields import contradiction, refused


def section() -> Any:
    """Return the default of a section that the job file omits: its own defaults, filled in by the job's validator.

    A default of ``SlurmSpec()`` would build a separate validator for each section and double the start-up time.
    """
    return Field(default_factory=dict, validate_default=True)


class Section(BaseModel):
    """What all parts of a job have in common."""

    # Built on first use, once for the whole job: building each section separately as well would double the start-up
    # time.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True, allow_inf_nan=False)


class SlurmSpec(Section):
    """The request to Slurm; `None` leaves the choice to the cluster."""

    partition: fields.Line | None = None
    account: fields.Line | None = None
    qos: fields.Line | None = None
    nodes: fields.PositiveInt = 1
    gpus_per_node: fields.Gpus = 0  # a number, or "type:number"
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    cpus_per_task: fields.PositiveInt | None = None
    mem: fields.Memory | None = None  # per node, in sbatch's form
    time: fields.SlurmTime | None = None  # seconds
    constraint: fields.Line | None = None
    exclude: fields.Line | None = None
    nodelist: fields.Line | None = None
    reservation: fields.Line | None = None
    extra: options.Options = Field(default_factory=dict)  # any other sbatch option; None and True: without a value

    @property
    def gpu_count(self) -> int:
        """Number of GPUs per node, 0 for none."""
        return int(str(self.gpus_per_node).rpartition(":")[2])

    @property
    def gpu_type(self) -> str | None:
        """Type of the GPUs, such as ``a100``; `None` for any."""
        return str(self.gpus_per_node).rpartition(":")[0] or None

    @model_validator(mode="after")
    def _check(self) -> "SlurmSpec":
        options.check_against_keys(self.extra, mem=self.mem, cpus_per_task=self.cpus_per_task)
        return self


class ContainerSpec(Section):
    """The container that the node program and the ranks run in."""

    image: fields.Text
    runtime: Literal["apptainer", "pyxis", "enroot"] = "apptainer"
    mounts: fields.Strings = ()


class LaunchSpec(Section):
    """How ranks are started on the nodes."""

    procs_per_node: fields.PositiveIntOrAuto = "auto"  # auto: one per GPU, or one without GPUs
    setup: fields.Strings = ()  # lines of bash, run before anything else
    python: fields.Text | None = None  # the interpreter of the ranks; None: the one that submitted
    port: fields.PortOrAuto = "auto"
    join_timeout: fields.Seconds = 600
    max_restarts: fields.NonNegativeInt = 0
    snapshot: bool = False  # whether the run keeps a copy of the code and uses that
    hang_timeout: fields.SecondsOrAuto = "auto"
    container: ContainerSpec | None = None

    @property
    def fixed_procs(self) -> int | None:
        """Ranks per node; None for ``auto``."""
        return None if self.procs_per_node == "auto" else self.procs_per_node

    @property
    def fixed_port(self) -> int | None:
        """Where the nodes meet; None for ``auto``."""
        return None if self.port == "auto" else self.port


class NetworkSpec(Section):
    """NCCL's and Gloo's settings; `None` leaves the choice to the profile."""

    profile: Literal["auto", "ethernet", "infiniband", "roce"] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: `choose_backend` in train/ranks/distributed.py
    ib_disable: bool | None = None
    socket_ifname: fields.Text | None = None
    timeout: fields.Seconds | None = None  # of the process group
    debug: Literal["off", "warn", "info", "detail"] | None = None
    env: dict[str, fields.AnyString] = Field(default_factory=dict)

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                allowed = "a name of letters, digits and '_', no digit first"
                raise refused("is not the name of a variable", allowed=allowed, at=(name,), show=False)
        return env

    @property
    def fixed_backend(self) -> Literal["nccl", "gloo"] | None:
        """The backend; None for ``auto``."""
        return None if self.backend == "auto" else self.backend

    @model_validator(mode="after")
    def _check(self) -> "NetworkSpec":
        if self.ib_disable and self.profile in ("infiniband", "roce"):
            raise contradiction(
                f"true contradicts network.profile: {self.profile}, which is the network that it turns off",
                at="ib_disable",
                instead="omit one of the two, or profile: ethernet",
            )
        return self


class RequeueSpec(Section):
    """When a stopped run continues by itself."""

    signal: fields.Signal = "USR1"
    warning: fields.Seconds = 120  # before the time limit
    max_requeues: fields.NonNegativeInt = 100
    max_without_progress: fields.PositiveInt = 3  # attempts without a new checkpoint before the run is STALLED


class ScalerSpec(Section):
    """The gradient scaler of fp16 (torch.amp.GradScaler)."""

    initial: fields.Positive = 65536.0
    growth_interval: fields.PositiveInt = 2000  # steps
    growth_factor: float = Field(default=2.0, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)


class ProfileSpec(Section):
    """torch.profiler, for a range of steps."""

    steps: fields.StepRange  # first and last, both included


class TrainSpec(Section):
    """The training itself. Without `epochs` and `steps` it is one epoch; without a batch size it is 32 per rank."""

    epochs: fields.PositiveInt | None = None
    steps: fields.PositiveInt | None = None
    batch_size: fields.PositiveInt | None = None  # samples of a micro-batch; with global_batch: its ceiling
    global_batch: fields.PositiveInt | None = None  # samples per step, over all ranks and accumulation steps
    accumulation_steps: fields.PositiveInt | None = None
    lr: fields.Positive = 1e-3
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"  # of lr, by global batch / base_batch
    base_batch: fields.PositiveInt | None = None
    warmup_steps: fields.NonNegativeInt = 0
    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    min_lr: fields.NotNegative = 0.0
    decay_every: fields.PositiveInt | None = None  # steps between the drops of schedule: step; None: a third of all
    decay_factor: float = Field(default=0.1, gt=0, lt=1)  # of schedule: step
    weight_decay: fields.NotNegative = 0.01
    precision: Literal["fp32", "fp16", "bf16", "auto"] = "fp32"
    scaler: ScalerSpec = section()
    tf32: bool = False
    clip_norm: fields.Positive | None = None
    sync_batchnorm: bool = False
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    grad_checkpointing: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_mb: fields.Positive = 25.0  # size of DDP's gradient buckets, MiB
    gradient_as_bucket_view: bool = True
    comm_hook: Literal["none", "fp16", "bf16"] = "none"
    compile: bool = False
    deterministic: bool = False
    seed: int = Field(default=0, ge=0, lt=2**63)
    workers: int = Field(default=0, ge=0, le=1024)  # DataLoader workers of each rank
    drop_last: bool = True  # the last global batch of an epoch, when it is not full
    evaluate_every: fields.Evaluation = "epoch"  # epoch, end, or a number of steps
    max_bad_steps: fields.PositiveInt = 10  # steps in a row with a non-finite loss or gradient before training ends
    profile: ProfileSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        if filled.get("epochs") is None and filled.get("steps") is None:
            filled["epochs"] = 1
        if filled.get("batch_size") is None and filled.get("global_batch") is None:
            filled["batch_size"] = 32
        return filled

    @model_validator(mode="after")
    def _check(self) -> "TrainSpec":
        if self.epochs is not None and self.steps is not None:
            raise contradiction(
                f"{self.steps} contradicts train.epochs: {self.epochs}", at="steps", instead="one of the two, not both"
            )
        self._check_batches()
        if self.lr_scaling != "none" and self.base_batch is None:
            raise contradiction(
                f"{self.lr_scaling} needs train.base_batch",
                at="lr_scaling",
                instead="give the global batch that train.lr was chosen for as train.base_batch",
            )
        if self.compile and self.grad_checkpointing:
            raise contradiction(
                "true does not work with train.compile: true, which cannot trace recomputed blocks",
                at="grad_checkpointing",
                instead="one of the two, not both",
            )
        if self.min_lr > self.lr:
            raise contradiction(f"{self.min_lr} is more than train.lr: {self.lr}", "min_lr", instead="at most train.lr")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise contradiction(
                f"{self.warmup_steps} is more than train.steps: {self.steps}",
                at="warmup_steps",
                instead="at most train.steps",
            )
        return self

    def _check_batches(self) -> None:
        if self.global_batch is None:
            return
        for key in ("batch_size", "accumulation_steps"):
            part = getattr(self, key)
            if part is not None and self.global_batch % part:
                raise contradiction(
                    f"{self.global_batch} is not divisible by train.{key}: {part}",
                    at="global_batch",
                    instead=f"a multiple of {part}, or omit train.{key}",
                )


class KeepBestSpec(Section):
    """The checkpoint that is kept because it is the best."""

    metric: fields.Text  # such as val/accuracy
    mode: Literal["max", "min"] = "max"


class CheckpointSpec(Section):
    """When to save and what to keep. Without `every_steps` and `every_minutes`: every ten minutes."""

    every_steps: fields.PositiveInt | None = None
    every_minutes: fields.Positive | None = None
    keep_last: fields.PositiveInt = 3
    keep_every: fields.PositiveInt | None = None  # steps: multiples of it are kept forever
    keep_best: KeepBestSpec | None = None
    background: bool = True
    when_busy: Literal["wait", "skip"] = "wait"  # if a save is due while the previous one is still being written
    ranks_writing: Literal["all", "node", "one"] = "all"

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("every_steps") is None and data.get("every_minutes") is None:
            return {**data, "every_minutes": 10.0}
        return data


class WandbSpec(Section):
    """Weights & Biases. The API key comes from the environment, never from here."""

    project: fields.Line | None = None  # None: the job's name
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    init_timeout: fields.Seconds = 120


class LogSpec(Section):
    """What is recorded during training."""

    every_steps: fields.PositiveInt = 10
    sample_ids: bool = False
    tensorboard: bool = False
    wandb: WandbSpec | None = None


class StorageSpec(Section):
    """Who may change the contents of the run directory."""

    mode: Literal["owner", "group"] = "owner"  # group: everything belongs to the group of runs_dir, which may change it


class NotifySpec(Section):
    """A user's command that runs when a run has ended."""

    command: fields.Text  # a line of bash, with the object of `status --json` on its standard input
    on: fields.Occasions = ("completed", "failed", "stalled")


class JobSpec(Section):
    """A whole job."""

    name: fields.Name
    runs_dir: fields.Text | None = None  # None: see `run.runs.runs_dir_of`
    task: fields.Target | None = None  # "package.module:Class" or "/path/to/file.py:Class"
    params: fields.Params = Field(default_factory=dict)  # passed to the task
    script: fields.Text | None = None
    args: fields.Strings = ()  # passed to the script
    args_on_resume: fields.Strings = ()  # appended to `args` in every attempt but the first
    not_secret: fields.Strings = ()  # keys that look like the name of a secret but are not, such as params.api_key
    slurm: SlurmSpec = section()
    launch: LaunchSpec = section()
    network: NetworkSpec = section()
    requeue: RequeueSpec = section()
    train: TrainSpec = section()
    checkpoint: CheckpointSpec = section()
    log: LogSpec = section()
    storage: StorageSpec = section()
    notify: NotifySpec | None = None

    @property
    def procs_per_node(self) -> int:
        """Ranks per node: ``launch.procs_per_node``, where ``auto`` means one per GPU, or one without GPUs."""
        if self.launch.fixed_procs is not None:
            return self.launch.fixed_procs
        return max(self.slurm.gpu_count, 1)

    @property
    def world_size(self) -> int:
        """Ranks over all nodes, as requested by the job file."""
        return self.slurm.nodes * self.procs_per_node

    @model_validator(mode="after")
    def _check(self) -> "JobSpec":
        self._check_program()
        self._check_requeue()
        gpus, ranks = self.slurm.gpu_count, self.procs_per_node
        if 0 < gpus < ranks:
            raise contradiction(
                f"{ranks} is more than the {gpus} GPUs of a node (slurm.gpus_per_node)",
                at="launch.procs_per_node",
                instead="at most one rank per GPU; auto: one per GPU",
            )
        return self

    def _check_program(self) -> None:
        if self.task is not None and self.script is not None:
            raise contradiction(f"{self.script!r} contradicts task: {self.task}", at="script", instead="one of the two")
        if self.task is None and self.script is None:
            raise contradiction(
                "neither task nor script is given: nothing to train",
                at="",
                instead="task: package.module:Class, task: path/to/file.py:Class, or script: train.py",
            )
        if self.script is not None and self.params:
            raise contradiction("params go to a task, and this job runs a script", at="params", instead="args: [...]")
        if self.task is not None and self.args:
            raise contradiction("args go to a script, and this job runs a task", at="args", instead="params: {...}")
        if self.task is not None and self.args_on_resume:
            raise contradiction(
                "a task resumes by itself; only a script needs to be told", at="args_on_resume", instead="params: {...}"
            )

    def _check_requeue(self) -> None:
        shortest = {"slurm.time": self.slurm.time, "slurm.extra.time-min": options.time_min(self.slurm.extra)}
        for key, seconds in shortest.items():
            if seconds is not None and self.requeue.warning >= seconds:
                raise contradiction(
                    f"the warning {self.requeue.warning} s before the time limit would come before the job starts "
                    f"({key} is {seconds} s)",
                    at="requeue.warning",
                    instead=f"less than {key}",
                )
