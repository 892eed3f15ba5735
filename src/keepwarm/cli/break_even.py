"""From how many tokens on it is faster to load a prompt from a shared tier than to compute it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from keepwarm.cache.restore.rates import LoadSize, Rates, RatesFile
from keepwarm.config import Settings
from keepwarm.models.catalog import find, find_local
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.units import format_rate

if TYPE_CHECKING:
    from keepwarm.remote.opening import RemoteReport  # only where a remote is set

MOST_TOKENS = 1 << 17  # of a prompt
USUAL_TOKENS = 1 << 11  # at which rates are stated


class ModelCosts(NamedTuple):
    """What the engine remembers of a model on this machine."""

    name: str
    rates: Rates
    size: LoadSize

    @property
    def tokens_per_s(self) -> float:
        return USUAL_TOKENS / self.rates.prefill_s(0, USUAL_TOKENS)

    def is_faster(self, remote: RemoteReport, n_tokens: int) -> bool:
        """Whether so many tokens are asked for, and loaded no slower than they are computed."""
        computing_s = self.rates.prefill_s(0, n_tokens)
        load_s = remote.latency_s + self.size.n_bytes(n_tokens) / remote.bytes_per_s
        return remote.is_asked(computing_s) and load_s <= computing_s


def is_here(settings: Settings) -> bool:
    """Whether the model of the settings is on this machine."""
    return _path_of(settings) is not None


def _path_of(settings: Settings) -> Path | None:
    return find(settings.model, settings) or find_local(settings.model)


def remembered_costs(settings: Settings) -> ModelCosts | None:
    """Those of the model of the settings; None until it has computed a prompt on this machine."""
    path = _path_of(settings)
    rates = None if path is None else RatesFile(settings.home).latest(str(path))
    return ModelCosts(settings.model, rates, rates.size) if rates and rates.size else None


def break_even(model: ModelCosts, remote: RemoteReport) -> int | None:
    """The number of tokens, in whole blocks, from which on loading wins; None if there is none."""
    found = None
    for n_tokens in range(MOST_TOKENS, 0, -BLOCK_TOKENS):
        if not model.is_faster(remote, n_tokens):
            break
        found = n_tokens
    return found


def describe(model: ModelCosts, remote: RemoteReport) -> str:
    """The break-even in one sentence."""
    n_tokens = break_even(model, remote)
    is_far = n_tokens is None and break_even(model, remote._replace(latency_s=0.0)) is not None
    verdict = (
        f"{'too far, never asked: ' * is_far}computing beats loading up to {MOST_TOKENS:,} tokens"
        if n_tokens is None
        else f"loading beats computing from {n_tokens:,} tokens on"
    )
    loaded = remote.bytes_per_s * USUAL_TOKENS / model.size.n_bytes(USUAL_TOKENS)
    rate = format_rate(remote.bytes_per_s)
    return (
        f"{verdict} ({rate}, or {loaded:,.0f} tokens/s of {Path(model.name).name}, "
        f"against {model.tokens_per_s:,.0f} computed)"
    )
