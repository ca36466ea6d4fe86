"""Data sets of Hugging Face's datasets, with the items of the zoo's."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from zoo_data import MakeData, noise, samples


def rows() -> dict[str, Any]:
    """The samples as columns of numbers."""
    inputs, labels = samples()
    return {"inputs": inputs.tolist(), "labels": labels.tolist()}


def hf_streaming(transform: Any = None) -> Dataset[Any]:
    """A stream of Hugging Face's datasets: four shards, shuffled by a buffer."""
    import datasets

    stream = datasets.Dataset.from_dict(rows()).to_iterable_dataset(num_shards=4)
    stream = stream.map(transform) if transform else stream
    return stream.shuffle(seed=1, buffer_size=8).with_format("torch")


def augmented_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row with random augmentation."""
    return {**row, "inputs": (torch.tensor(row["inputs"]) + noise()).tolist()}


def augmented_rows(rows: dict[str, Any]) -> dict[str, Any]:
    """Rows with random augmentation."""
    return {"inputs": [torch.tensor(row) + noise() for row in rows["inputs"]], "labels": rows["labels"]}


def hf_map(*, augmented: bool) -> Dataset[Any]:
    """A map-style set of Hugging Face's datasets, which is fetched by batch."""
    import datasets

    made = datasets.Dataset.from_dict(rows())
    return made.with_transform(augmented_rows) if augmented else made.with_format("torch")


HF_DATA: dict[str, MakeData] = {
    "datasets, streaming": hf_streaming,
    "datasets, map-style": lambda: hf_map(augmented=False),
    "datasets, map-style with random augmentation": lambda: hf_map(augmented=True),
}
