"""Exactness for what people train, on one rank: a training through crashes is bitwise the calm one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zoo_table import OF_DATA, OF_MODELS, OF_OPTIMIZERS, OF_STEPS, REFUSED, compose
from zoo_training import CRASHES, Case, judge

# The parameters of "norms" are of all the kinds that those of "mlp" are.
_OF_OPTIMIZERS = [
    pytest.param(case, marks=[pytest.mark.chaos] if case.model == "mlp" else []) for case in OF_OPTIMIZERS
]


@pytest.mark.parametrize("case", [*_OF_OPTIMIZERS, *OF_MODELS, *OF_STEPS], ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_case_is_exact(case: Case, tmp_path: Path) -> None:
    assert str(judge(case, tmp_path, crashes=CRASHES[:1])) == "exact"


@pytest.mark.parametrize("case", OF_DATA, ids=str)
def test_case_is_exact_in_both_epochs(case: Case, tmp_path: Path) -> None:
    assert str(judge(case, tmp_path)) == "exact"


@pytest.mark.parametrize(("case", "message"), REFUSED, ids=str)
def test_case_is_refused_in_its_first_steps(case: Case, message: str, tmp_path: Path) -> None:
    verdict = judge(case, tmp_path, crashes=CRASHES[:1])
    assert message in (verdict.refused or ""), verdict
    assert verdict.refused_at in (-1, 0, 1, 2)


@pytest.mark.parametrize("case", [compose(Random(seed)) for seed in range(16)], ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_composed_case_is_exact(case: Case, tmp_path: Path) -> None:
    assert str(judge(case, tmp_path)) == "exact"


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@settings(max_examples=1500, suppress_health_check=list(HealthCheck))
@given(case=st.randoms(use_true_random=False).map(compose))
def test_any_composed_case_is_exact(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert str(judge(case, tmp_path_factory.mktemp("composed"))) == "exact"


@pytest.mark.chaos
def test_ten_thousand_parameters_are_exact(tmp_path: Path) -> None:
    assert str(judge(Case(model="10,000 parameters"), tmp_path)) == "exact"
