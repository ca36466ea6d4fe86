"""The task or script is looked up, and nothing of the user's runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_ddp.job import JobFileError, load_job

WriteJob = Callable[..., Path]
TRAP = "open('ran', 'w').close()\nraise SystemExit('imported!')\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def package(here: Path) -> Path:
    """Packages, plain and without __init__.py, whose modules must not be imported."""
    for folder in ("mine/deep", "spaces/inner"):
        (here / folder).mkdir(parents=True)
    for folder in ("mine", "mine/deep"):
        (here / folder / "__init__.py").write_text(TRAP + "class InPackage: ...\n")
    for folder in ("mine", "mine/deep", "spaces/inner"):
        (here / folder / "tasks.py").write_text(
            TRAP
            + "from elsewhere import Imported\nimport whole.package as Renamed\n"
            + "class Mine: ...\nif True:\n    class Inside: ...\ntry:\n    pass\nexcept Exception:\n    Assigned = 3\n"
            + "def function():\n    class Hidden: ...\n"
        )
    return here


@pytest.mark.parametrize(
    "task",
    [
        "mine.tasks:Mine",
        "mine.deep.tasks:Mine",
        "spaces.inner.tasks:Mine",
        "mine:InPackage",
        "mine.deep:InPackage",
        "mine.tasks:Inside",
        "mine.tasks:Assigned",
        "mine.tasks:Imported",
        "mine.tasks:Renamed",
        "mine/tasks.py:Mine",
    ],
)
def test_a_task_is_found_without_importing_anything(package: Path, job: WriteJob, task: str) -> None:
    before = set(sys.modules)
    load_job(str(job(f"task: {task}\n")))
    assert not (package / "ran").exists()
    assert not {name for name in set(sys.modules) - before if name.startswith(("mine", "spaces"))}


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("mine.tasks:Mime", ["no class Mime in", "did you mean: Mine", "classes there: Inside, Mine"]),
        ("mine.tasks:function", ["no class function"]),
        ("mine.tasks:Hidden", ["no class Hidden"]),
        ("mine.taks:Mine", ["no module taks in mine"]),
        ("nowhere.tasks:Mine", ["no module nowhere"]),
        ("spaces.inner:Mine", ["without __init__.py"]),
        ("mine.tasks.more:Mine", ["no module more in mine.tasks"]),
        ("mine/taks.py:Mine", ["mine/taks.py: no such file"]),
        ("mine/deep.py:Mine", ["no such file"]),
        ("broken.py:Mine", ["broken.py:2: not Python"]),
        ("nul.py:Mine", ["not Python"]),
    ],
)
def test_a_task_that_is_not_there(package: Path, errors_of: Callable[..., str], task: str, says: list[str]) -> None:
    (package / "broken.py").write_text("x = 1\nclass Mine(:\n")
    (package / "nul.py").write_bytes(b"x = 1\0\n")
    message = errors_of(f"name: x\ntask: {task}\n")
    assert "job.yaml:2: task: " in message
    for part in says:
        assert part in message, message


def test_a_module_that_makes_its_names_at_import_is_taken_at_its_word(here: Path, job: WriteJob) -> None:
    (here / "stars.py").write_text("from elsewhere import *\n")
    (here / "lazy.py").write_text("def __getattr__(name): ...\n")
    for module in ("stars", "lazy"):
        load_job(str(job(f"task: {module}:Anything\n")))


def test_a_missing_script(errors_of: Callable[..., str], here: Path) -> None:
    assert f"job.yaml:1: script: {here}/train.py: no such file" in errors_of("script: train.py\n")
    (here / "train.py").mkdir()
    assert f"script: {here}/train.py: is a folder" in errors_of("script: train.py\n")


def test_a_script_that_starts_ranks_itself(here: Path, job: WriteJob) -> None:
    text = "import torch.multiprocessing as mp\nfrom torch.distributed import init_process_group\n"
    (here / "train.py").write_text(f"{text}if __name__ == '__main__':\n    mp.spawn(print, nprocs=2)\n")
    (warning,) = load_job(str(job("script: train.py\n"))).warnings
    assert f"job.yaml:1: script: {here}/train.py:4 starts ranks itself, but torchrun does that here" in warning
    for harmless in ("if args.multiprocessing_distributed:\n    mp.spawn(print)\n", "mp.Queue()\n"):
        (here / "train.py").write_text(text + harmless)
        assert load_job(str(job("script: train.py\n"))).warnings == ()


def test_a_script_that_imports_from_its_own_package(errors_of: Callable[..., str], here: Path, job: WriteJob) -> None:
    (here / "pkg" / "inner").mkdir(parents=True)
    (here / "pkg" / "__init__.py").touch()
    script = here / "pkg" / "inner" / "train.py"
    script.write_text("import torch\nfrom .model import net\n")
    told = errors_of("script: pkg/inner/train.py\n")
    assert f"{script}:2: from .model import net: a script does not belong to a package" in told
    assert 'next to the folder pkg/ that runs it: import runpy; runpy.run_module("pkg.inner.train", run_name=' in told
    for works in ("__package__ = 'pkg'\nfrom .model import net", "try:\n    from .model import net\nexcept: 1", "\0"):
        script.write_text(works)
        load_job(str(job("script: pkg/inner/train.py\n")))


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ("task: nowhere.tasks:Mine\nlaunch: {container: {image: a.sif}}\n", "launch.container"),
        ("script: /in/the/container.py\nlaunch: {container: {image: a.sif}}\n", "launch.container"),
        ("task: nowhere.tasks:Mine\nlaunch: {python: /opt/python}\n", "launch.python"),
    ],
)
def test_only_a_warning_where_something_else_will_run_it(job: WriteJob, text: str, warns: str) -> None:
    (warning,) = load_job(str(job(text))).warnings
    assert warns in warning
    assert "job.yaml:1: " in warning


def test_a_missing_file_is_missing_for_any_python(job: WriteJob) -> None:
    with pytest.raises(JobFileError, match="no such file"):
        load_job(str(job("script: train.py\nlaunch: {python: /opt/python}\n")))


def test_the_look_up_can_be_left_out(job: WriteJob) -> None:
    assert load_job(str(job("task: nowhere:Mine\n")), check_target=False).spec.task == "nowhere:Mine"
