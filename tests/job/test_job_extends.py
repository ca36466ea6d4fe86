"""`extends:`, the templates, and overrides."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_ddp.job import JobFileError, load_job, template_file, template_names

WriteJob = Callable[..., Path]
TEMPLATES = ["cpu", "debug", "multi-node", "preemptible", "quickstart", "single-node"]


def test_the_templates_are_there() -> None:
    assert template_names() == TEMPLATES


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_a_valid_job_of_its_own(name: str) -> None:
    loaded = load_job(name)
    assert loaded.warnings == ()
    assert loaded.spec.name == name
    assert loaded.spec.task == "cluster_ddp.tasks.digits:Digits"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_short_and_says_what_it_is_for(name: str) -> None:
    lines = template_file(name).read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 120


def test_a_template_can_be_copied_and_stays_valid(tmp_path: Path) -> None:
    for name in TEMPLATES:
        copy = tmp_path / f"my_{name}.yaml"
        copy.write_text(template_file(name).read_text())
        assert load_job(str(copy)).spec.name == f"my_{name}"


def test_a_job_is_laid_over_its_template(job: WriteJob) -> None:
    file = job("extends: multi-node\nslurm: {nodes: 4, partition: gpu}\ncheckpoint: {keep_best: }\n", "mine.yaml")
    spec = load_job(str(file)).spec
    base = load_job("multi-node").spec
    assert (spec.name, spec.slurm.nodes, spec.slurm.partition) == ("mine", 4, "gpu")
    assert (spec.slurm.gpus_per_node, spec.train) == (base.slurm.gpus_per_node, base.train)
    assert base.checkpoint.keep_best is not None
    assert spec.checkpoint.keep_best is None


def test_a_name_is_not_inherited(job: WriteJob) -> None:
    job("name: other\ntask: cluster_ddp.tasks.digits:Digits\n", "base.yaml")
    assert load_job(str(job("extends: base.yaml\n", "mine.yaml"))).spec.name == "mine"


def test_a_list_replaces_the_list_below(job: WriteJob) -> None:
    job("task: cluster_ddp.tasks.digits:Digits\nlaunch: {setup: [a, b]}\n", "base.yaml")
    assert load_job(str(job("extends: base.yaml\nlaunch: {setup: [c]}\n"))).spec.launch.setup == ("c",)


def test_the_other_choice_takes_the_place_of_the_inherited_one(job: WriteJob, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    spec = load_job(str(job("extends: multi-node\nscript: train.py\nargs: [-v]\ntrain: {steps: 100}\n"))).spec
    assert (spec.task, spec.script) == (None, str(tmp_path / "train.py"))
    assert (spec.train.epochs, spec.train.steps) == (None, 100)
    back = load_job(str(tmp_path / "job.yaml"), ["task=cluster_ddp.tasks.digits:Digits", "train.epochs=2"]).spec
    assert (back.script, back.args, back.train.steps, back.train.epochs) == (None, (), None, 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "name: x\nextends: multinode\n",
            [":2: extends: there is no template", "did you mean: multi-node", "quickstart"],
        ),
        ("name: x\nextends: missing.yaml\n", [":2: extends: ", "missing.yaml: no such file"]),
        ("extends: [a]\n", [":1: extends: is not a string"]),
        ("extends: 3\n", [":1: extends: is not a string"]),
        ("extends: job.yaml\n", [":1: extends: is circular", "job.yaml -> "]),
        ("extends: /\n", [":1: extends: /: is a folder"]),
    ],
)
def test_what_cannot_be_extended(errors_of: Callable[..., str], text: str, says: list[str]) -> None:
    message = errors_of(text)
    for part in says:
        assert part in message


def test_a_circle_of_several_files_is_named(job: WriteJob, tmp_path: Path) -> None:
    job("extends: b.yaml\n", "a.yaml")
    job("extends: c.yaml\n", "b.yaml")
    job("extends: ./../" + tmp_path.name + "/a.yaml\n", "c.yaml")
    with pytest.raises(JobFileError, match=r"c\.yaml:1: extends: .*a\.yaml -> .*b\.yaml -> .*c\.yaml -> .*a\.yaml"):
        load_job(str(tmp_path / "a.yaml"))


def test_an_error_names_the_place_where_it_was_made(job: WriteJob, tmp_path: Path) -> None:
    job("task: a:B\nslurm:\n  nodes: 0\n", "base.yaml")
    with pytest.raises(JobFileError, match=re.escape(f"{tmp_path / 'base.yaml'}:3: slurm.nodes: 0 is too small")):
        load_job(str(job("extends: base.yaml\nslurm: {time: 5}\n")))


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("slurm.nodes=4", "nodes", 4),
        ("slurm.time=12:00:00", "time", 12 * 3600),
        ("slurm.time=30", "time", 1800),
        ("slurm.partition=no", "partition", "no"),
        ("slurm.partition= 0123 ", "partition", "0123"),
        ('slurm.partition="x y"', "partition", "x y"),
        ("slurm.partition=a: b #c", "partition", "a: b #c"),
        ("slurm.constraint=a=b", "constraint", "a=b"),
        ("slurm.cpus_per_task=null", "cpus_per_task", None),
        ("slurm.extra={exclusive: user}", "extra", {"exclusive": "user"}),
    ],
)
def test_an_override_is_a_yaml_1_2_scalar(override: str, key: str, value: object) -> None:
    assert getattr(load_job("multi-node", [override]).spec.slurm, key) == value


def test_the_last_override_wins_and_others_stay() -> None:
    spec = load_job(
        "cpu", ["train.lr=1", "train.lr=1e-2", "launch.setup=[a, b]", "params.width=8", "params.x.y=z"]
    ).spec
    assert (spec.train.lr, spec.train.schedule) == (0.01, "cosine")
    assert spec.launch.setup == ("a", "b")
    assert spec.params == {"width": 8, "x": {"y": "z"}}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("slurm.time=banana", 'slurm.time: "banana" is not a duration'),
        ("slurm.tmie=3", "did you mean: time"),
        ("slurm.nodes", "KEY=VALUE"),
        ("train.lr=", "has an empty value"),
        ("slurm.partition= ", "null for the key's default"),
        ("=3", "KEY=VALUE"),
        ("slurm..nodes=3", "KEY=VALUE"),
        ("a." * 500 + "b=3", "KEY=VALUE"),
        ("slurm=3", "3 is not a mapping"),
        ("launch.setup=[a", "not YAML"),
        ("train.lr=.inf", "not a finite number"),
        ("extends=cpu", "can only be set in the job file"),
        ("name.first=x", "a mapping is not a string"),
        ("params.x=\udcff", "not UTF-8"),
        ("script=nowhere.py", "nowhere.py: no such file"),
    ],
)
def test_a_wrong_override_is_named(override: str, says: str) -> None:
    with pytest.raises(JobFileError) as caught:
        load_job("multi-node", [override])
    assert str(caught.value).startswith("--set ")
    assert override.partition("=")[0] in str(caught.value)
    assert says in str(caught.value)


def test_an_unknown_job_names_the_templates() -> None:
    with pytest.raises(JobFileError, match=r'(?s)"quickstrat".*did you mean: quickstart.*multi-node'):
        load_job("quickstrat")
    with pytest.raises(JobFileError, match=r"nowhere/job\.yaml: no such file"):
        load_job("nowhere/job.yaml")
