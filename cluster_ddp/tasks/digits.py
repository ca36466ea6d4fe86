"""Handwritten digits: image classification with a small ResNet on real data that ships with the package.

The data are the 1,797 images of 8x8 pixels of the UCI data set "Optical Recognition of Handwritten Digits" (E.
Alpaydin, C. Kaynak, 1998, DOI 10.24432/C50P49, CC BY 4.0; see ``data/ATTRIBUTION.md``). With the settings of the
template ``quickstart`` this trains to about 99 % validation accuracy in less than a minute on two CPU cores.
"""

from __future__ import annotations

import io
import random
from importlib import resources

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from cluster_ddp.train import Task

CLASSES = 10
PIXELS = 8
BRIGHTEST = 16.0
VALIDATION_EVERY = 5
"""Of the images of each class, in the order of the set, every fifth is for validation."""


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read the images and labels that ship with the package.

    Returns
    -------
    images : array of uint8, shape (1797, 8, 8)
        Brightness from 0 to 16.
    labels : array of uint8, shape (1797,)
        The digit, 0 to 9.
    """
    packed = resources.files("cluster_ddp.tasks").joinpath("data/digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return arrays["images"], arrays["labels"]


def is_validation(labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which samples are for validation: every fifth of each class, so that both parts are balanced.

    Parameters
    ----------
    labels : array of uint8, shape (samples,)

    Returns
    -------
    array of bool, shape (samples,)
        Depends on the labels alone, so it is the same on every rank and in every attempt.
    """
    chosen = np.zeros(len(labels), dtype=np.bool_)
    for digit in range(CLASSES):
        of_this_digit = np.flatnonzero(labels == digit)
        chosen[of_this_digit[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]] = True
    return chosen


class DigitImages(Dataset[tuple[Tensor, Tensor]]):
    """Images and labels, shifted at random by up to ``shift`` pixels in each direction.

    Parameters
    ----------
    images : array of uint8, shape (samples, 8, 8)
    labels : array of uint8, shape (samples,)
    shift : int
        Pixels; 0 leaves the images unchanged. Drawn from :mod:`random` in ``__getitem__``, which the loader seeds by
        (seed, epoch, sample index).
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8], shift: int = 0) -> None:
        scaled = torch.from_numpy(images).float().div_(BRIGHTEST).unsqueeze(1)
        self.shift = shift
        self.padded = F.pad(scaled, (shift, shift, shift, shift))
        self.labels = torch.from_numpy(labels).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one sample: the image, float32 of shape (1, 8, 8) in 0..1, and the label, int64 of shape ()."""
        top = left = 0
        if self.shift:
            top, left = random.randint(0, 2 * self.shift), random.randint(0, 2 * self.shift)
        return self.padded[index, :, top : top + PIXELS, left : left + PIXELS], self.labels[index]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut (He et al. 2016, arXiv:1512.03385).

    Maps (batch, channels_in, h, w) to (batch, channels_out, h / stride, w / stride).
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class DigitNet(nn.Module):
    """A ResNet for 8x8 images: a stem, then one residual block at each of 8x8, 4x4 and 2x2 pixels.

    Maps images of shape (batch, 1, 8, 8) to logits of shape (batch, 10).
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, stride=1),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 4 * width, stride=2),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images)).mean(dim=(2, 3))
        logits: Tensor = self.head(self.dropout(features))
        return logits


class Digits(Task):
    """Classify handwritten digits.

    Parameters
    ----------
    width : int
        Channels of the first stage; the second and third have two and four times as many.
    dropout : float
        Fraction of the features set to zero before the last layer in training, in [0, 1).
    augment : bool
        Whether training images are shifted at random by up to one pixel in each direction.

    Raises
    ------
    ValueError
        If ``width`` is less than 1 or ``dropout`` is outside [0, 1).
    """

    def __init__(self, width: int = 16, dropout: float = 0.1, augment: bool = True) -> None:
        if width < 1:
            raise ValueError(f"params.width must be at least 1, not {width}")
        if not 0 <= dropout < 1:
            raise ValueError(f"params.dropout must be in [0, 1), not {dropout}")
        self.width = width
        self.dropout = dropout
        self.augment = augment

    def model(self) -> nn.Module:
        return DigitNet(self.width, self.dropout)

    def train_data(self) -> Dataset[tuple[Tensor, Tensor]]:
        """Return the 1,442 images for training."""
        images, labels = load_digits()
        chosen = ~is_validation(labels)
        return DigitImages(images[chosen], labels[chosen], shift=int(self.augment))

    def eval_data(self) -> Dataset[tuple[Tensor, Tensor]]:
        """Return the 355 images for validation, never shifted."""
        images, labels = load_digits()
        chosen = is_validation(labels)
        return DigitImages(images[chosen], labels[chosen])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the mean cross-entropy in nats."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Compute accuracy (0 or 1) and cross-entropy of each sample, both of shape (batch,)."""
        images, labels = batch
        logits = model(images)
        return {
            "accuracy": (logits.argmax(dim=1) == labels).float(),
            "loss": F.cross_entropy(logits, labels, reduction="none"),
        }
