"""The wheel holds all that it needs: built here, installed into a fresh environment, used from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
TEMPLATES = ("quickstart", "single-node", "multi-node", "preemptible", "debug", "cpu")


def run(*command: object, cwd: Path, timeout: float = 120) -> str:
    """Run a command far from the checkout, with nothing in the environment that leads back to it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CLUSTER_DDP", "SLURM", "VIRTUAL_ENV"))}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{' '.join(words)} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, CHECKOUT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel installed by pip; its dependencies are those of the running environment.

    A folder named in a .pth file is searched after the environment's own packages, and .pth files inside that folder
    are not read, so that an editable install of the checkout cannot be taken for the wheel's.
    """
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin"


def test_wheel_holds_templates_data_and_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"cluster_ddp/job_templates/{name}.yaml" for name in TEMPLATES} <= names
    assert {"cluster_ddp/py.typed", "cluster_ddp/submit/template.sbatch"} <= names
    assert {"cluster_ddp/run/requeue/start_failed.sh", "cluster_ddp/run/setup_guard.sh"} <= names
    data = {str(p.relative_to(CHECKOUT)) for p in (CHECKOUT / "cluster_ddp/tasks/data").iterdir() if p.is_file()}
    assert data
    assert data <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"cluster_ddp"}


def test_installed_package_is_the_wheels(fresh: Path, tmp_path: Path) -> None:
    code = "import cluster_ddp, cluster_ddp.tasks.digits as d; print(cluster_ddp.__file__, len(d.load_digits()[1]))"
    place, count = run(fresh / "python", "-c", code, cwd=tmp_path).split()
    assert Path(place).is_relative_to(fresh.parent)
    assert int(count) > 1000


def test_templates_are_listed(fresh: Path, tmp_path: Path) -> None:
    listed = run(fresh / "cluster-ddp", "templates", cwd=tmp_path)
    assert [name for name in TEMPLATES if name not in listed] == []


def test_dry_run_from_another_folder(fresh: Path, tmp_path: Path) -> None:
    script = run(fresh / "cluster-ddp", "submit", "multi-node", "--dry-run", cwd=tmp_path)
    assert script.startswith(("#!/bin/bash\n", "#!/usr/bin/env bash\n"))
    assert "#SBATCH" in script
    assert "--rdzv-backend=c10d" in script
    assert str(CHECKOUT) not in script
    assert list(tmp_path.iterdir()) == []


def test_module_call_is_the_same_command(fresh: Path, tmp_path: Path) -> None:
    by_module = run(fresh / "python", "-m", "cluster_ddp", "templates", cwd=tmp_path)
    assert by_module == run(fresh / "cluster-ddp", "templates", cwd=tmp_path)
