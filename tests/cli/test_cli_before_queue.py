"""What `submit` finds out before there is a job, and how it says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_stage import PARTITION, Call, Slurm

ASKED = ("submit", "job.yaml", "--set")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("slurm.partition=gpuu", "slurm.partition: there is no partition gpuu. Did you mean gpu? There are: gpu"),
        ("slurm.cpus_per_task=256", "slurm.cpus_per_task: 256 is more than any node of partition gpu has: 128"),
        ("slurm.mem=600G", "slurm.mem: 600G is more than any node of partition gpu has: 512000 MiB"),
        ("slurm.gpus_per_node=8", "slurm.gpus_per_node: 8 is more than any node of partition gpu has: 4"),
        ("slurm.gpus_per_node=h100:1", "more than any node of partition gpu has: 0 (of the types a100)"),
        ("slurm.nodes=6", "slurm.nodes: 6 is more than partition gpu allows: 5"),
        ("slurm.time=2-00", "slurm.time: 2-00:00:00 is more than partition gpu allows: 1-00:00:00"),
        ("slurm.account=bio", "slurm.account: partition gpu takes no jobs of bio, only of lab, phys"),
    ],
)
def test_what_the_partition_never_gives(call: Call, here: Path, slurm: Slurm, setting: str, said: str) -> None:
    answer = call(*ASKED, setting)
    assert answer.status == 2
    assert f"--set {setting.partition('=')[0]}=...: " in answer.err and said in answer.err
    assert slurm.submissions() == []
    assert call(*ASKED, setting, "--no-check").status == 0


def test_fewer_nodes_than_wanted_have_it_all(call: Call, here: Path, slurm: Slurm) -> None:
    answer = call(*ASKED, "slurm.nodes=5", "--set", "slurm.gpus_per_node=4")
    assert answer.status == 2
    assert "5 is more than partition gpu has with 1 CPUs, 4 GPUs each: 4" in answer.err


def test_a_question_without_an_answer_is_told_and_passed_over(call: Call, here: Path, slurm: Slurm) -> None:
    slurm.program("scontrol", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    answer = call("submit", "job.yaml")
    assert answer.status == 0
    assert "note: could not check the partitions of the cluster: scontrol failed" in answer.err
    slurm.program("sbatch", "echo 'Batch job submission failed: Unable to contact slurm controller' >&2; exit 1")
    answer = call("submit", "job.yaml")
    assert answer.status == 3 and answer.err.count("Unable to contact") == 1
    assert "Nothing was queued. Try again once Slurm answers" in answer.err


def test_the_script_that_is_tried_is_the_one_that_is_sent(call: Call, here: Path, slurm: Slurm) -> None:
    assert call("submit", "job.yaml").status == 0
    (run,) = (here / "runs").iterdir()
    assert (slurm.folder / "tried").read_text() == (run / "job.sbatch").read_text()


def test_submitit_asks_slurm_the_same_before(call: Call, here: Path, slurm: Slurm) -> None:
    slurm.program("srun", "exit 1")
    asked = ("submit", "job.yaml", "--via", "submitit", "--set")
    answer = call(*asked, "slurm.nodes=6")
    assert answer.status == 2
    assert "slurm.nodes: 6 is more than partition gpu allows: 5" in answer.err
    assert not (slurm.folder / "tried").exists()
    (slurm.folder / "sbatch").write_text("#!/bin/bash\necho 'Invalid feature specification' >&2\nexit 1\n")
    answer = call(*asked, "slurm.constraint=none")
    assert answer.status == 3
    assert "sbatch failed (status 1): Invalid feature" in answer.err and "What to do: slurm.constraint" in answer.err
    assert not (here / "runs").exists()


def test_runs_on_a_file_system_of_this_machine_are_warned_of(call: Call, here: Path, slurm: Slurm) -> None:
    answer = call("submit", "job.yaml", "--set", "runs_dir=/dev/shm/cluster-ddp-none", "--set", "slurm.nodes=6")
    assert "/dev/shm is local to each machine" in answer.err


def test_a_task_that_cannot_be_imported_is_refused(call: Call, here: Path, slurm: Slurm, imported: None) -> None:
    (here / "picky.py").write_text("class Other: pass\n")
    (here / "broken.py").write_text("import no_such_package\nclass Broken: pass\n")
    job = ("submit", "job.yaml", "--set", "task=broken.py:Broken", "--set", "params={}")
    answer = call(*job)
    assert answer.status == 2
    assert "--set task=" in answer.err and "No module named 'no_such_package'" in answer.err
    assert f"{here / 'broken.py'}:1" in answer.err
    assert slurm.submissions() == []
    other = call("submit", "job.yaml", "--set", "task=picky.py:Other", "--set", "params={}")
    assert other.status == 2
    assert f": task: Other in {here / 'picky.py'} does not derive from cluster_ddp.train.Task\n" in other.err
    setup = call(*job, "--set", 'launch.setup=["module() { :; }"]')
    assert setup.status == 0 and "only a note" in setup.err


def test_the_task_is_imported_while_slurm_is_asked(call: Call, here: Path, slurm: Slurm, imported: None) -> None:
    python, begun = here / "python", here / "begun"
    python.write_text(f"#!/bin/bash\necho $$ >{begun}.new; mv {begun}.new {begun}; exec sleep 60\n")
    python.chmod(0o755)
    slurm.program("scontrol", f"until [[ -e {begun} ]]; do sleep 0.02; done; echo '{PARTITION}'")
    answer = call(*ASKED, "slurm.nodes=6", "--set", f"launch.python={python}")
    assert answer.status == 2
    assert "slurm.nodes: 6 is more than partition gpu allows: 5" in answer.err
    assert not Path("/proc", begun.read_text().strip()).exists()  # nothing goes on after the command


def test_a_script_is_not_run_to_see_what_it_imports(call: Call, here: Path, slurm: Slurm, imported: None) -> None:
    (here / "job.yaml").write_text("script: train.py\n")
    (here / "train.py").write_text("open('ran', 'w')\nimport json, no_such_package\n")
    answer = call("submit", "job.yaml")
    assert answer.status == 2
    assert "job.yaml:1: script:" in answer.err and "'no_such_package'" in answer.err
    assert not (here / "ran").exists()


PICKY = """\
from torch import nn
from cluster_ddp.train import Task
class Picky(Task):
    def __init__(self, width=8, heads=4):
        if width < 1:
            raise ValueError(f"width must be at least 1, not {width}")
        self.width, self.heads = width, heads
    def model(self):
        return nn.MultiheadAttention(self.width, self.heads)
"""


def test_what_a_task_refuses_of_a_sweep_is_told_by_its_elements(
    call: Call, here: Path, slurm: Slurm, imported: None
) -> None:
    (here / "picky.py").write_text(PICKY)
    job = ("job.yaml", "--set", "task=picky.py:Picky", "--set", "params={}", "--grid", "train.seed=1,2")
    answer = call("sweep", *job, "--grid", "params.width=8,0,6", "--grid", "params.heads=2,4")
    assert answer.status == 2, answer.err
    assert "element 2 and 3 more: task: it rejects the params: ValueError: width must be at least 1" in answer.err
    assert f"{here / 'picky.py'}:6" in answer.err
    assert "element 5 and 1 more: task: it rejects the params: AssertionError: embed_dim must be div" in answer.err
    assert slurm.submissions() == []
    assert call("sweep", *job, "--grid", "params.width=8,4").status == 0


def test_params_that_a_task_refuses_by_itself_are_told(call: Call, here: Path, slurm: Slurm, imported: None) -> None:
    (here / "picky.py").write_text(PICKY)
    job = ("submit", "job.yaml", "--set", "task=picky.py:Picky", "--set")
    answer = call(*job, "params={width: 0}")
    assert answer.status == 2
    assert "--set task=" in answer.err and "it rejects the params: ValueError: width must be at least 1" in answer.err
    unknown = call(*job, "params={widht: 8}")
    assert unknown.status == 2
    assert "task: Picky does not take these params: got an unexpected keyword argument 'widht'\n" in unknown.err
    assert "TaskError" not in unknown.err
    # Whether it is the model or this machine cannot be told where none can be built.
    assert call(*job, "params={width: 6}").status == 0


def test_a_sweep_whose_models_take_long_is_tried_in_part(call: Call, here: Path, slurm: Slurm, imported: None) -> None:
    (here / "slow.py").write_text(PICKY.replace("return nn", "import time; time.sleep(0.3); return nn"))
    widths = ",".join(map(str, range(4, 400, 4)))
    answer = call("sweep", "job.yaml", "--set", "task=slow.py:Picky", "--grid", f"params.width={widths}")
    assert answer.status == 0, answer.err
    assert re.search(r"9\d of 99 different params were not tried", answer.err)


def test_a_task_file_asks_for_nothing_that_trains() -> None:
    program = "import sys; from cluster_ddp.train import Task; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "cluster_ddp.train.task" in loaded
    assert {"cluster_ddp.train.public", "cluster_ddp.train.trainer", "cluster_ddp.job.loading"}.isdisjoint(loaded)


HUGE = """\
from torch import nn
from cluster_ddp.train import Task
print("noise")
class Huge(Task):
    def model(self):
        return nn.Linear(1 << 20, 1 << 20)
"""


def test_a_save_that_does_not_fit_into_the_warning_is_told(
    call: Call, here: Path, slurm: Slurm, imported: None
) -> None:
    (here / "huge.py").write_text(HUGE)
    settings = ("task=huge.py:Huge", "params={}", "requeue.warning=5s")
    answer = call("submit", "job.yaml", *(word for setting in settings for word in ("--set", setting)))
    assert answer.status == 0, answer.err
    assert "a checkpoint of 12288.0 GiB takes about" in answer.err
    assert "requeue.warning is 5 s before the time limit: make it longer" in answer.err
