"""docs/job-file.md tells the truth: every key of the job file stands there, with its default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster_ddp.job import JobSpec, load_job
from cluster_ddp.job.document import plain, read_document

PAGE = Path(__file__).parents[2] / "docs" / "job-file.md"


def documented_job(tmp_path: Path) -> JobSpec:
    text = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    job = tmp_path / "job.yaml"
    job.write_text(text)
    return load_job(str(job), check_target=False).spec


def keys(value: Any, prefix: str = "") -> set[str]:
    if not isinstance(value, dict) or not value:
        return {prefix}
    return {key for name, part in value.items() for key in keys(part, f"{prefix}.{name}" if prefix else name)}


def test_every_documented_default_is_the_programs(tmp_path: Path) -> None:
    # batch sizes and epochs have defaults only where the others are not given, so they are said to the model too
    bare = {"name": "my-job", "task": "my_package.my_module:MyTask"}
    assert documented_job(tmp_path).model_dump() == JobSpec.model_validate(bare).model_dump()


def test_every_key_of_the_models_is_documented(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(PAGE.read_text().split("```yaml\n")[1].split("```")[0])
    bare = {"name": "my-job", "task": "my_package.my_module:MyTask"}
    assert keys(JobSpec.model_validate(bare).model_dump()) == keys(plain(read_document(job)))
