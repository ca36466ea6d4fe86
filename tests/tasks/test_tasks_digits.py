from __future__ import annotations

import random
from importlib import resources

import numpy as np
import pytest
import torch

from cluster_ddp.tasks.digits import Digits, is_validation, load_digits


def test_the_data_are_the_1797_images_of_the_uci_set():
    images, labels = load_digits()
    assert images.shape == (1797, 8, 8) and images.dtype == np.uint8
    assert (images.min(), images.max()) == (0, 16)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert images[0].tolist()[0] == [0, 0, 5, 13, 9, 1, 0, 0] and labels[:10].tolist() == list(range(10))


def test_the_attribution_that_the_licence_asks_for_ships_with_the_data():
    text = resources.files("cluster_ddp.tasks").joinpath("data/ATTRIBUTION.md").read_text(encoding="utf-8")
    for words in ("Alpaydin", "Kaynak", "10.24432/C50P49", "CC BY 4.0"):
        assert words in text


def test_the_split_is_disjoint_complete_and_holds_all_digits_alike():
    labels = load_digits()[1]
    chosen = is_validation(labels)
    task = Digits()
    assert (len(task.train_data()), len(task.eval_data())) == (1442, 355)
    assert int(chosen.sum()) == 355
    assert set(np.bincount(labels[chosen])) <= {34, 35, 36}
    assert torch.equal(task.eval_data().labels, torch.from_numpy(labels[chosen]).long())


def test_a_sample_is_a_function_of_its_seed_and_shifts_by_at_most_one_pixel():
    data, plain = Digits().train_data(), Digits(augment=False).train_data()

    def draw(seed):
        random.seed(seed)
        return data[3][0]

    assert torch.equal(draw(1), draw(1))
    seen = {tuple(draw(seed).flatten().tolist()) for seed in range(200)}
    whole = torch.nn.functional.pad(plain[3][0], (1, 1, 1, 1))
    expected = {
        tuple(whole[:, top : top + 8, left : left + 8].flatten().tolist()) for top in range(3) for left in range(3)
    }
    assert seen == expected
    image, label = data[3]
    assert image.shape == (1, 8, 8) and image.dtype == torch.float32 and float(image.max()) <= 1
    assert label.shape == () and label.dtype == torch.int64


def test_validation_images_are_never_shifted():
    data = Digits(augment=True).eval_data()
    assert torch.equal(data[0][0], data[0][0])
    images, labels = load_digits()
    first = images[is_validation(labels)][0]
    assert torch.equal(data[0][0][0], torch.from_numpy(first).float() / 16)


def test_the_network_has_batchnorm_and_dropout():
    kinds = {type(module).__name__ for module in Digits().model().modules()}
    assert {"BatchNorm2d", "Dropout", "ResidualBlock"} <= kinds


@pytest.mark.parametrize("params", [{"width": 0}, {"dropout": 1.0}])
def test_impossible_params_are_refused_by_name(params):
    with pytest.raises(ValueError, match=f"params.{next(iter(params))}"):
        Digits(**params)


def test_it_learns_to_97_percent(train, evaluate):
    task = Digits()
    metrics = evaluate(task, train(task, steps=220, batch=64, lr=0.01))
    assert metrics["accuracy"] >= 0.97
    assert metrics["loss"] < 0.12
