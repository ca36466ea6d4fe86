"""The elements of a sweep: what they are, what they are called, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_ddp.job import JobFileError, load_job, load_variant, load_variants
from cluster_ddp.job.document import dump
from cluster_ddp.job.grid import elements_of, labels, read_list


def test_every_combination_in_the_order_of_the_grid() -> None:
    elements = elements_of(["train.lr=1e-3,1e-4", "params.width=8, 16"])
    assert elements == [
        ("train.lr=1e-3", "params.width=8"),
        ("train.lr=1e-3", "params.width=16"),
        ("train.lr=1e-4", "params.width=8"),
        ("train.lr=1e-4", "params.width=16"),
    ]
    assert labels(elements)[1] == "lr=1e-3-width=16"


def test_commas_inside_of_a_value_belong_to_it() -> None:
    (lists,) = ([element[0] for element in elements_of(["params.a=[1,[2,3]],\"x,y\",{b: 'c,d'},it's,e"])],)
    assert lists == [
        "params.a=[1,[2,3]]", 'params.a="x,y"', "params.a={b: 'c,d'}", "params.a=it's", "params.a=e",
    ]  # fmt: skip


def test_a_list_of_elements_and_a_grid(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("- {train.lr: 1e-3, params.text: '0123'}\n- train: {lr: 2e-3}\n  params: {text: a b}\n- {}\n")
    listed = read_list(file)
    assert listed == [("train.lr=1e-3", 'params.text="0123"'), ("train.lr=2e-3", "params.text=a b"), ()]
    elements = elements_of(["params.width=8,9"], listed)
    assert len(elements) == 6
    assert labels(elements)[2] == "lr=2e-3-text=a_b-width=8"
    specs = [load_job("quickstart", element).spec for element in elements]
    assert [spec.params.get("text") for spec in specs] == ["0123", "0123", "a b", "a b", None, None]


def test_a_name_shows_what_differs_and_only_that() -> None:
    assert labels(elements_of(["params.lr=1,2", "train.lr=3,4", "train.seed=7"]))[0] == "params.lr=1-train.lr=3"
    assert labels(elements_of(["train.seed=7"])) == ["seed=7"]


@pytest.mark.parametrize(
    "value", ["$(touch x)", "`touch x`", "../../x", "a\nb", "'; touch x; '", "\x1b[2J", "ü", "-rf", "~", "*"]
)
def test_nothing_of_a_hostile_value_is_left_in_a_name(value: str) -> None:
    (label,) = labels([(f"params.x={value}",)])
    assert label.isascii()
    assert not set(label) & set("$`/'; \n\x1b*~()[")


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([], "settings that vary"),
        (["train.lr"], "KEY=VALUE,VALUE"),
        (["train.lr=1,,2"], "empty value"),
        (["train.lr=1,1"], "elements 0 and 1 are the same"),
        (["train.lr=1,2", "train.lr=3,4"], "given twice"),
        (["slurm.nodes=1,2"], "share one batch script"),
        (["name=a,b"], "share one batch script"),
        ([f"params.{key}=" + ",".join(map(str, range(100))) for key in "abc"], "1,000,000 elements are too many"),
    ],
)  # fmt: skip
def test_what_is_no_grid_is_refused(grid: list[str], message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        elements_of(grid)


def test_an_error_names_the_element_and_the_key() -> None:
    elements = elements_of(["train.lr=1e-3,abc", "train.seed=1,2"])
    with pytest.raises(JobFileError, match=r'^element 2 and 1 more: --set train.lr=abc: train.lr: "abc" is not a num'):
        load_variants("quickstart", (), elements)
    with pytest.raises(JobFileError, match=r"^element 0: .*train.global_batch: .*cannot be divided") as caught:
        load_variants("quickstart", ("slurm.nodes=4",), elements_of(["train.global_batch=6,8"]))
    assert "element 1" not in str(caught.value)


def test_a_secret_among_the_values_is_refused_and_not_repeated() -> None:
    with pytest.raises(JobFileError, match=r"element 0 and 1 more.*the name of a secret") as caught:
        load_variants("quickstart", (), elements_of(["params.api_key=abcdef,b"]))
    assert "abcdef" not in str(caught.value)


def test_a_variant_is_what_submit_with_these_settings_would_be(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("extends: quickstart\nslurm: {account: 0123}\ntrain: {epochs: 2}\nparams: {flag: null}\n")
    settings, element = ["slurm.nodes=1", "train.warmup_steps=0"], ("train.steps=7", "train.global_batch=5")
    variants = load_variants(str(job), settings, [element])
    kept = tmp_path / "kept.yaml"
    kept.write_text(dump(variants.job))
    assert load_variant(kept, element) == load_job(str(job), [*settings, *element]).spec == variants.first.spec
