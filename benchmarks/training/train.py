"""The training loop: rows grow from an eighth of the context to all of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from multiprocessing import Value
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn

from .batches import Batch, loader
from .evaluate import Sizes, quick
from .net import autocast
from .samples import Samples

RATE = 2e-3
WARM_UP_STEPS = 100
MIN_LENGTH = 512  # room for the description of tools
SAY_EVERY_S = 15.0
KEEP_EVERY_S = 60.0


class Plan(NamedTuple):
    seconds: float
    sizes: Sizes
    n_tokens: int  # of a batch
    workers: int
    device: str


class Trained(NamedTuple):
    steps: int
    tokens: int
    seconds: float


def length_at(done: float, context: int) -> int:
    """Half of the time goes to rows of a quarter and less, which are learned from fastest."""
    return max(MIN_LENGTH, context >> max(0, 3 - int(done * 4)))


def rate_at(done: float, step: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return RATE * min(1.0, step / WARM_UP_STEPS) * (0.02 + 0.98 * cosine)


def train(
    net: nn.Module, learned: Samples, held_out: Samples, plan: Plan, keep: Callable[[], None]
) -> Trained:
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05, fused=plan.device == "cuda"
    )
    length = Value("i", length_at(0.0, plan.sizes.context))
    start = said = kept = time.monotonic()
    step = n_tokens = 0
    for batch in loader(learned, length, plan.n_tokens, plan.workers):
        now = time.monotonic()
        done = (now - start) / plan.seconds
        if done >= 1:
            break
        length.value = length_at(done, plan.sizes.context)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(done, step)
        loss = _step(net, optimizer, batch.to(plan.device))
        step += 1
        n_tokens += batch.weights.numel()
        if now - said >= SAY_EVERY_S:
            said = now
            so_far = f"{now - start:4.0f} s  step {step:5}  loss {loss.item():.3f}"
            _say(net, held_out, plan, batch.weights.shape[1], so_far)
        if now - kept >= KEEP_EVERY_S:
            kept = now
            keep()
    return Trained(step, n_tokens, time.monotonic() - start)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    with autocast(batch.tokens.device.type):
        logits = net(batch.tokens[:, :-1])
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none"
    )
    loss = (losses * batch.weights.flatten()).sum() / batch.weights.sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for weight in net.parameters():
        weight.grad.nan_to_num_(0.0)  # one bad batch is left out, without waiting for the GPU
    optimizer.step()
    return loss.detach()


def _say(net: nn.Module, held_out: Samples, plan: Plan, length: int, so_far: str) -> None:
    copy, needle = quick(net, held_out, length, max(2, plan.sizes.rows // 4), plan.device)
    print(f"{so_far}  rows of {length}  copy {copy:.4f}  needle {needle:.3f}", flush=True)
