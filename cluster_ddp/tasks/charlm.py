"""A small GPT that predicts the next character of any text file.

By default it reads *Alice's Adventures in Wonderland* (Lewis Carroll, 1865, public domain), which ships
with the package. The model is the decoder-only transformer of Radford et al. 2019 ("Language Models are Unsupervised
Multitask Learners", GPT-2) in small: layer norm before each sub-layer, learned positions, output weights tied to the
embedding (Press and Wolf 2017, arXiv:1608.05859).
"""

from __future__ import annotations

from functools import cached_property
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from cluster_ddp.train import Task

VALIDATION_SHARE = 0.1


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer; keeps the shape (batch, time, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def attend(self, x: Tensor) -> Tensor:
        """Let each position attend to itself and those before it."""
        batch, time, width = x.shape
        packed = self.queries_keys_values(x).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = packed.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=dropout)
        merged: Tensor = self.merge(seen.transpose(1, 2).reshape(batch, time, width))
        return F.dropout(merged, self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        fed: Tensor = self.feed_forward(self.norm2(x))
        return x + fed


class CharGPT(nn.Module):
    """A decoder-only transformer over characters.

    Maps character numbers, int64 of shape (batch, time) with time at most ``context``, to logits of shape
    (batch, time, vocabulary); the logits at position t are for the character at t + 1.
    """

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.characters.weight

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.dropout(self.characters(characters) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    """Initialize weights with a standard deviation of 0.05 (GPT-2's 0.02 is for a width of 768), biases with zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class CharLM(Task):
    """Predict the next character of a text.

    Parameters
    ----------
    text : str or None
        Path of a UTF-8 text file, as seen from the nodes; None for the one that ships with the package. Its characters
        are the vocabulary; its last tenth is for validation.
    context : int
        Characters that the model sees at once.
    layers, width, heads : int
        Size of the transformer; ``width`` must be a multiple of ``heads``.
    dropout : float
        In [0, 1).

    Raises
    ------
    ValueError
        If ``width`` is not a multiple of ``heads``, or the text is too short for one window of training and validation.
    """

    def __init__(
        self,
        text: str | None = None,
        context: int = 64,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        if width % heads:
            raise ValueError(f"params.width ({width}) must be a multiple of params.heads ({heads})")
        self.path = text
        self.context = context
        self.layers = layers
        self.width = width
        self.heads = heads
        self.dropout = dropout

    @cached_property
    def text(self) -> str:
        if self.path is None:
            return resources.files("cluster_ddp.tasks").joinpath("data/alice.txt").read_text(encoding="utf-8")
        return Path(self.path).read_text(encoding="utf-8")

    @cached_property
    def vocabulary(self) -> str:
        """The characters of the text in the order of their code points; a character's number is its index here."""
        return "".join(sorted(set(self.text)))

    def encode(self, text: str) -> Tensor:
        """Turn text into character numbers, int64 of shape (characters,)."""
        number = {character: place for place, character in enumerate(self.vocabulary)}
        return torch.tensor([number[character] for character in text], dtype=torch.long)

    def split(self) -> tuple[str, str]:
        """Return the text for training and, from the end of the file, the text for validation."""
        border = round(len(self.text) * (1 - VALIDATION_SHARE))
        return self.text[:border], self.text[border:]

    def model(self) -> nn.Module:
        return CharGPT(len(self.vocabulary), self.context, self.layers, self.width, self.heads, self.dropout)

    def train_data(self) -> TensorDataset:
        """Return windows of ``context + 1`` characters, each starting half a context after the previous one."""
        return self._windows(self.split()[0], stride=max(1, self.context // 2))

    def eval_data(self) -> TensorDataset:
        """Return adjacent windows, so that every character but the first is predicted at most once."""
        return self._windows(self.split()[1], stride=self.context)

    def _windows(self, text: str, stride: int) -> TensorDataset:
        if len(text) <= self.context:
            raise ValueError(
                f"the text {self.path or 'of the package'} is too short: a tenth of it, the part for validation, must "
                f"be longer than params.context ({self.context} characters); give a longer text or a smaller context"
            )
        return TensorDataset(self.encode(text).unfold(0, self.context + 1, stride))

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the cross-entropy summed over all characters, in nats, and how many characters there are."""
        loss = self._character_losses(model, batch)[0]
        return loss.sum(), loss.new_full((), loss.numel())

    def evaluate(self, model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
        """Compute the mean cross-entropy and the accuracy of each window, both of shape (batch,)."""
        loss, logits, targets = self._character_losses(model, batch)
        right = logits.argmax(dim=-1) == targets
        return {"loss": loss.mean(dim=1), "accuracy": right.float().mean(dim=1)}

    def _character_losses(self, model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses (batch, context), logits (batch, context, vocabulary) and targets (batch, context)."""
        (windows,) = batch
        targets = windows[:, 1:]
        logits = model(windows[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none"), logits, targets
