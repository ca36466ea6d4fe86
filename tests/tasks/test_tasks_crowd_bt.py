from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import default_collate

from cluster_ddp.tasks.crowd_bt import Comparisons, CrowdBT, CrowdScorer, simulate

SMALL = {"backbone": "mlp", "width": 32, "items": 500, "annotators": 40, "comparisons": 12000}


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    ranks = [values.argsort().argsort().double() for values in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


@pytest.mark.parametrize("data_seed", [0, 1])
def test_scores_and_reliabilities_are_recovered_and_better_than_by_plain_bradley_terry(train, data_seed):
    crowd, plain = CrowdBT(**SMALL, data_seed=data_seed), CrowdBT(**SMALL, data_seed=data_seed, trust_all=True)
    truth = crowd.data
    by_crowd, by_plain = (train(task, steps=1300, batch=64, lr=0.01) for task in (crowd, plain))
    with torch.no_grad():
        scores = by_crowd.score(truth.items)
        recovered = spearman(scores, truth.true_scores)
        recovered_plain = spearman(by_plain.score(truth.items), truth.true_scores)
        reliability = by_crowd.reliability()
    assert recovered > 0.95
    assert recovered > recovered_plain + 0.01
    assert spearman(reliability, truth.true_reliability) > 0.95
    assert float((reliability - truth.true_reliability).abs().mean()) < 0.06
    assert by_plain.reliability() is None


@torch.no_grad()
def test_the_likelihood_is_the_formula_of_chen_et_al():
    scorer = CrowdScorer(torch.nn.Flatten(), annotators=3)
    with torch.no_grad():
        scorer.reliability_logits.copy_(torch.tensor([0.9, 0.5, 0.2]).logit())
    winner, loser, annotator = torch.tensor([[1.5], [1.5], [-2.0]]), torch.tensor([[0.5], [0.5], [1.0]]), [0, 1, 2]
    log_likelihood, scores = scorer(winner, loser, torch.tensor(annotator))
    for row, (eta, gap) in enumerate(((0.9, 1.0), (0.5, 1.0), (0.2, -3.0))):
        follows = 1 / (1 + math.exp(-gap))
        assert float(log_likelihood[row].exp()) == pytest.approx(eta * follows + (1 - eta) * (1 - follows), rel=1e-5)
    assert torch.equal(scores, torch.stack((winner, loser)).squeeze(-1))


def test_extreme_scores_stay_finite():
    scorer = CrowdScorer(torch.nn.Flatten(), annotators=1)
    far = torch.tensor([[500.0]])
    log_likelihood, _ = scorer(-far, far, torch.tensor([0]))
    log_likelihood.sum().backward()
    assert torch.isfinite(log_likelihood).all() and torch.isfinite(scorer.reliability_logits.grad).all()


def test_the_simulated_crowd_answers_as_often_by_the_scores_as_it_is_reliable():
    crowd = simulate(items=200, annotators=4, comparisons=60000, seed=5)
    assert not torch.any(crowd.winner == crowd.loser)
    gap = crowd.true_scores[crowd.winner] - crowd.true_scores[crowd.loser]
    for annotator, eta in enumerate(crowd.true_reliability.tolist()):
        mine = crowd.annotator == annotator
        follows = torch.sigmoid(gap[mine].abs())
        expected = float((eta * follows + (1 - eta) * (1 - follows)).mean())
        assert float((gap[mine] > 0).float().mean()) == pytest.approx(expected, abs=0.015)
    assert float(crowd.true_scores.std()) == pytest.approx(2.0, rel=0.1)


def test_the_simulation_is_a_function_of_its_seed():
    first, again, other = (simulate(50, 5, 100, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.items, again.items) and torch.equal(first.winner, again.winner)
    assert not torch.equal(first.winner, other.winner)


def test_a_batch_fetched_at_once_holds_the_same_samples_as_one_by_one():
    data = CrowdBT(**SMALL).train_data()
    together = default_collate(data.__getitems__([5, 0, 9]))
    one_by_one = default_collate([data[5], data[0], data[9]])
    assert all(torch.equal(a, b) for a, b in zip(together, one_by_one, strict=True))
    assert together[0].shape == (3, 1, 8, 8)


def test_training_and_validation_share_no_comparison():
    task = CrowdBT(**SMALL)
    training, validation = task.train_data(), task.eval_data()
    assert (len(training), len(validation)) == (10800, 1200)
    assert torch.equal(torch.cat((training.winner, validation.winner)), task.data.winner)


def test_comparisons_of_ones_own_need_one_method_and_any_item_shape(train, evaluate):
    class Mine(CrowdBT):
        def comparisons(self) -> Comparisons:
            better = torch.arange(1, 21).repeat(20)
            return Comparisons(
                items=torch.linspace(-1, 1, 21).view(21, 1, 1, 1).expand(21, 3, 2, 2),
                winner=better,
                loser=better - 1,
                annotator=torch.zeros(400, dtype=torch.long),
            )

    task = Mine(backbone="conv", width=8)
    assert evaluate(task, train(task, steps=100, batch=32, lr=0.02))["agreement"] == 1.0


def test_an_unknown_backbone_is_refused_with_what_is_allowed():
    with pytest.raises(ValueError, match="mlp, conv"):
        CrowdBT(backbone="resnet")
