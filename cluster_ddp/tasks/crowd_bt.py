"""A quality scorer trained on pairwise judgements of a crowd whose members differ in reliability.

A backbone gives each item i a score s_i. With sigma(d) = 1 / (1 + exp(-d)), Crowd-BT says that annotator k, shown i and
j, prefers i with probability

    P(i >_k j) = eta_k sigma(s_i - s_j) + (1 - eta_k) sigma(s_j - s_i)

where eta_k in (0, 1) is the annotator's reliability: near 1 for one who follows the scores, 1/2 for one who tosses a
coin, near 0 for one who answers the wrong way round. Source: X. Chen, P. N. Bennett, K. Collins-Thompson, E.
Horvitz, "Pairwise ranking aggregation in a crowdsourced setting", WSDM 2013; with eta_k = 1 it is the model of R. A.
Bradley and M. E. Terry, Biometrika 39, 1952. Scores and reliabilities are learned together from the comparisons alone.
The likelihood does not change when all eta_k become 1 - eta_k and all scores change sign; starting at eta_k > 1/2 (most
annotators mean well) picks the right one of the two.

To train on your own comparisons, derive from :class:`CrowdBT` and override :meth:`CrowdBT.comparisons`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from cluster_ddp.tasks.digits import BRIGHTEST, load_digits
from cluster_ddp.train import Task

BACKBONES = ("mlp", "conv")
VALIDATION_SHARE = 0.1
FIRST_RELIABILITY = 0.8
SCORE_SPREAD = 2.0
"""Standard deviation of the simulated true scores: two items one deviation apart are told apart in 88 % of cases."""

Sample = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Comparisons:
    """What a crowd said about pairs of items.

    Attributes
    ----------
    items : Tensor, float32, shape (items, channels, height, width)
    winner, loser : Tensor, int64, shape (comparisons,)
        Indices of the items; the annotator preferred the winner.
    annotator : Tensor, int64, shape (comparisons,)
        Indices of the annotators, from 0.
    true_scores : Tensor or None, float32, shape (items,)
        Known in a simulation only.
    true_reliability : Tensor or None, float32, shape (annotators,)
        The probability that an annotator follows the scores; known in a simulation only.
    """

    items: Tensor
    winner: Tensor
    loser: Tensor
    annotator: Tensor
    true_scores: Tensor | None = None
    true_reliability: Tensor | None = None

    @property
    def annotators(self) -> int:
        return int(self.annotator.max()) + 1


def simulate(
    items: int, annotators: int, comparisons: int, reliability: tuple[float, float] = (0.2, 1.0), seed: int = 0
) -> Comparisons:
    """Simulate comparisons with known truth: handwritten digits degraded by noise, judged by an uneven crowd.

    Item i is an image of the digits data set blended with noise, whose share u_i is uniform in 0..1; its true score
    falls linearly with u_i and has mean 0 and standard deviation `SCORE_SPREAD`. Annotator k's reliability is uniform
    in ``reliability``. Each comparison takes two different items and one annotator at random and draws the answer from
    the formula at the top of this module.

    Parameters
    ----------
    items, annotators, comparisons : int
        How many of each.
    reliability : tuple of two floats
        Lowest and highest eta_k, in [0, 1].
    seed : int
        The same seed gives the same comparisons everywhere.
    """
    random = torch.Generator().manual_seed(seed)
    digits = torch.from_numpy(load_digits()[0]).float().div(BRIGHTEST).unsqueeze(1)
    clean = digits[torch.randint(len(digits), (items,), generator=random)]
    spoiled = torch.rand(items, generator=random)
    noise = torch.rand(clean.shape, generator=random)
    images = torch.lerp(clean, noise, spoiled.view(-1, 1, 1, 1))
    scores = SCORE_SPREAD * (0.5 - spoiled) * math.sqrt(12)

    lowest, highest = reliability
    eta = lowest + (highest - lowest) * torch.rand(annotators, generator=random)
    first = torch.randint(items, (comparisons,), generator=random)
    second = (first + torch.randint(1, items, (comparisons,), generator=random)) % items
    annotator = torch.randint(annotators, (comparisons,), generator=random)
    follows_scores = torch.rand(comparisons, generator=random) < eta[annotator]
    better_first = torch.rand(comparisons, generator=random) < torch.sigmoid(scores[first] - scores[second])
    first_wins = follows_scores == better_first
    return Comparisons(
        items=images,
        winner=torch.where(first_wins, first, second),
        loser=torch.where(first_wins, second, first),
        annotator=annotator,
        true_scores=scores,
        true_reliability=eta,
    )


class ComparisonData(Dataset[Sample]):
    """Comparisons as samples: the winner's item, the loser's item and the annotator's number.

    A sample has the shapes (channels, height, width) twice and (). Fetched by batch through ``__getitems__``.
    """

    def __init__(self, comparisons: Comparisons, chosen: slice) -> None:
        self.items = comparisons.items
        self.winner = comparisons.winner[chosen]
        self.loser = comparisons.loser[chosen]
        self.annotator = comparisons.annotator[chosen]

    def __len__(self) -> int:
        return len(self.winner)

    def __getitem__(self, index: int) -> Sample:
        return self.items[self.winner[index]], self.items[self.loser[index]], self.annotator[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a whole batch at once."""
        rows = torch.as_tensor(indices)
        columns = (self.items[self.winner[rows]], self.items[self.loser[rows]], self.annotator[rows])
        return list(zip(*(column.unbind() for column in columns), strict=True))


def build_backbone(kind: str, item_shape: torch.Size, width: int) -> nn.Module:
    """Build the module that maps items, shape (batch, channels, height, width), to scores, shape (batch, 1).

    Raises
    ------
    ValueError
        If ``kind`` is none of `BACKBONES`.
    """
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(item_shape.numel(), width), nn.ReLU(), nn.Linear(width, 1))
    if kind == "conv":
        return nn.Sequential(
            nn.Conv2d(item_shape[0], width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 1),
        )
    raise ValueError(f"params.backbone must be one of {', '.join(BACKBONES)}, not {kind!r}")


class CrowdScorer(nn.Module):
    """A backbone that scores items, and the reliability of each annotator.

    Parameters
    ----------
    backbone : Module
        Maps items, shape (batch, ...), to scores, shape (batch, 1).
    annotators : int
    trust_all : bool
        Fix eta_k = 1 for all: the plain Bradley-Terry model.
    """

    def __init__(self, backbone: nn.Module, annotators: int, trust_all: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        self.reliability_logits: nn.Parameter | None = None
        if not trust_all:
            at_first = math.log(FIRST_RELIABILITY / (1 - FIRST_RELIABILITY))
            self.reliability_logits = nn.Parameter(torch.full((annotators,), at_first))

    def score(self, items: Tensor) -> Tensor:
        """Score items, shape (batch, ...); returns shape (batch,), higher for better."""
        scores: Tensor = self.backbone(items).squeeze(-1)
        return scores

    def reliability(self) -> Tensor | None:
        """Return eta_k of all annotators, shape (annotators,), or None in the plain model."""
        return None if self.reliability_logits is None else torch.sigmoid(self.reliability_logits)

    def forward(self, winner: Tensor, loser: Tensor, annotator: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the log-likelihood of the answers.

        Parameters
        ----------
        winner, loser : Tensor, shape (batch, channels, height, width)
        annotator : Tensor, int64, shape (batch,)

        Returns
        -------
        log_likelihood : Tensor, shape (batch,)
            log P(winner >_k loser), in nats, at most 0.
        scores : Tensor, shape (2, batch)
            Scores of the winners and of the losers.
        """
        scores = self.score(torch.cat((winner, loser))).float().view(2, -1)
        gap = scores[0] - scores[1]
        if self.reliability_logits is None:
            return F.logsigmoid(gap), scores
        logits = self.reliability_logits[annotator]
        by_the_scores = F.logsigmoid(logits) + F.logsigmoid(gap)
        against_them = F.logsigmoid(-logits) + F.logsigmoid(-gap)
        return torch.logaddexp(by_the_scores, against_them), scores


class CrowdBT(Task):
    """Learn to score items from a crowd's comparisons, and how reliable each annotator is.

    Parameters
    ----------
    backbone : "mlp" or "conv"
    width : int
        Hidden units or channels of the backbone.
    items, annotators, comparisons, data_seed : int
        Size and seed of the simulated crowd.
    trust_all : bool
        Use the plain Bradley-Terry model, which trusts every annotator.
    pull : float
        Weight of the term that ties scores to those of a virtual item of score 0, which wins and loses once against
        each item (the regularization of Chen et al. 2013): without it nothing fixes the scores' common offset.
    """

    def __init__(
        self,
        backbone: str = "conv",
        width: int = 16,
        items: int = 1000,
        annotators: int = 50,
        comparisons: int = 20000,
        data_seed: int = 0,
        trust_all: bool = False,
        pull: float = 0.001,
    ) -> None:
        if backbone not in BACKBONES:
            raise ValueError(f"params.backbone must be one of {', '.join(BACKBONES)}, not {backbone!r}")
        self.backbone = backbone
        self.width = width
        self.size = (items, annotators, comparisons)
        self.data_seed = data_seed
        self.trust_all = trust_all
        self.pull = pull

    def comparisons(self) -> Comparisons:
        """Return all comparisons, the last tenth of them for validation. Override this to use your own."""
        items, annotators, comparisons = self.size
        return simulate(items, annotators, comparisons, seed=self.data_seed)

    @cached_property
    def data(self) -> Comparisons:
        return self.comparisons()

    def model(self) -> CrowdScorer:
        backbone = build_backbone(self.backbone, self.data.items.shape[1:], self.width)
        return CrowdScorer(backbone, self.data.annotators, self.trust_all)

    def train_data(self) -> ComparisonData:
        """Return the first nine tenths of the comparisons."""
        return ComparisonData(self.data, slice(None, self._border()))

    def eval_data(self) -> ComparisonData:
        """Return the last tenth of the comparisons."""
        return ComparisonData(self.data, slice(self._border(), None))

    def _border(self) -> int:
        return round(len(self.data.winner) * (1 - VALIDATION_SHARE))

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Compute the mean negative log-likelihood in nats, plus the pull towards the virtual item."""
        log_likelihood, scores = model(*batch)
        against_virtual_item = F.logsigmoid(scores) + F.logsigmoid(-scores)
        loss: Tensor = -log_likelihood.mean() - self.pull * against_virtual_item.mean()
        return loss

    def evaluate(self, model: nn.Module, batch: Sample) -> dict[str, Tensor]:
        """Compute each comparison's negative log-likelihood and whether the scores agree, both of shape (batch,)."""
        log_likelihood, scores = model(*batch)
        return {"loss": -log_likelihood, "agreement": (scores[0] > scores[1]).float()}
