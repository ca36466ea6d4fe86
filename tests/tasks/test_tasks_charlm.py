from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from cluster_ddp.tasks.charlm import CharLM


def bigram_entropy(text: str) -> float:
    """Nats per character of the best possible guess from the character before, on this very text."""
    pairs = Counter(pairwise(text))
    firsts = Counter(text[:-1])
    return -sum(count * math.log(count / firsts[pair[0]]) for pair, count in pairs.items()) / (len(text) - 1)


def test_the_loss_falls_below_what_any_bigram_model_can_reach(train, evaluate):
    assert bigram_entropy("abababab") == pytest.approx(0) and bigram_entropy("aabba") == pytest.approx(math.log(2))
    task = CharLM()
    metrics = evaluate(task, train(task, steps=400, batch=16, lr=5e-3))
    assert metrics["loss"] < bigram_entropy(task.split()[1])
    assert metrics["accuracy"] > 0.38


def test_the_text_that_ships_is_alice_and_splits_without_overlap():
    task = CharLM()
    training, validation = task.split()
    assert training + validation == task.text and "Down the Rabbit-Hole" in training
    assert len(validation) == pytest.approx(len(task.text) / 10, rel=0.01)
    decoded = "".join(task.vocabulary[number] for number in task.encode(task.text).tolist())
    assert decoded == task.text


def test_validation_windows_predict_each_character_once():
    task = CharLM(context=16)
    windows = task.eval_data().tensors[0]
    targets = "".join(task.vocabulary[number] for number in windows[:, 1:].flatten().tolist())
    validation = task.split()[1]
    assert targets == validation[1 : 1 + len(targets)] and len(validation) - len(targets) <= 16


@torch.no_grad()
def test_the_loss_is_a_sum_and_a_weight_that_add_up_over_uneven_batches():
    task = CharLM(context=16)
    torch.manual_seed(0)
    model, windows = task.model().eval(), task.eval_data()
    whole, weight = task.loss(model, windows[:24])
    parts = [task.loss(model, windows[a:b]) for a, b in ((0, 5), (5, 24))]
    assert whole.shape == weight.shape == ()
    assert float(weight) == 24 * 16 == sum(float(part[1]) for part in parts)
    assert float(whole) == pytest.approx(sum(float(part[0]) for part in parts), rel=1e-5)
    assert float(whole / weight) == pytest.approx(float(task.evaluate(model, windows[:24])["loss"].mean()), rel=1e-5)


def test_no_position_sees_a_later_character():
    task = CharLM(context=16)
    model = task.model().eval()
    text = task.eval_data()[:1][0][:, :16]
    changed = text.clone()
    changed[0, 10] = (changed[0, 10] + 1) % len(task.vocabulary)
    before, after = model(text), model(changed)
    assert torch.allclose(before[0, :10], after[0, :10], atol=1e-6)
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_it_reads_any_text_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("grüße aus köln, " * 40, encoding="utf-8")
    task = CharLM(text=str(path), context=8)
    assert "ü" in task.vocabulary and task.model()(task.eval_data()[:2][0][:, :8]).shape == (2, 8, len(task.vocabulary))


def test_a_text_that_is_too_short_is_refused_with_what_to_change(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("too short")
    with pytest.raises(ValueError, match=r"params\.context"):
        CharLM(text=str(path)).eval_data()


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match=r"params\.heads"):
        CharLM(width=30, heads=4)
