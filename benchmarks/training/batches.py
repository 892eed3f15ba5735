"""Batches made by worker processes while the GPU computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .samples import Make, Sample, Samples


class Batch(NamedTuple):
    """Tokens, and for each but the first what its prediction counts and whether it is an answer."""

    tokens: Tensor
    weights: Tensor
    answers: Tensor

    def to(self, device: str) -> Batch:
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


def stacked(samples: list[Sample]) -> Batch:
    tokens, weights, answers = (np.stack(column) for column in zip(*samples, strict=True))
    return Batch(
        torch.from_numpy(tokens).long(),
        torch.from_numpy(weights[:, 1:].copy()),
        torch.from_numpy(answers[:, 1:].copy()),
    )


def made(make: Make, rng: np.random.Generator, n_rows: int, length: int) -> Batch:
    """Rows whose inputs are `length` tokens."""
    return stacked([make(rng, length + 1) for _ in range(n_rows)])


class Mixed(IterableDataset[Batch]):
    """Endless batches of one size in tokens, of rows as long as is wanted by now."""

    def __init__(self, samples: Samples, length: Synchronized[int], n_tokens: int) -> None:
        self._samples = samples
        self._length = length
        self._n_tokens = n_tokens

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rng = np.random.default_rng(1 + (worker.id if worker else 0))
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        while True:
            length = self._length.value
            yield made(self._samples.mixed, rng, max(1, self._n_tokens // length), length)


def loader(
    samples: Samples, length: Synchronized[int], n_tokens: int, workers: int
) -> DataLoader[Batch]:
    mixed = Mixed(samples, length, n_tokens)
    return DataLoader(
        mixed,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        multiprocessing_context="fork" if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
