"""A store as one model uses it, beside mlx-lm's own generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from keepwarm import kv
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.errors import BadInput
from keepwarm.prefix.fingerprint import Identity


class RestoredPrompt(NamedTuple):
    """Caches that hold the first tokens of a prompt, and the tokens still to be fed."""

    cache: kv.Caches
    rest: list[int]


class AttachedModel:
    """A store as one model uses it."""

    def __init__(
        self,
        model: Any,
        identity: Identity,
        restorer: Restorer,
        kv_options: dict[str, Any],
    ) -> None:
        self._model = model
        self._kv_options = kv_options
        self.identity = identity
        self.restorer = restorer

    def restore(self, tokens: Sequence[int]) -> RestoredPrompt:
        """Caches for the longest stored prefix, or empty ones."""
        if not tokens:
            raise BadInput("There are no tokens to restore; pass a prompt.")
        found = self.restorer.restore(tokens)
        caches = found.caches or kv.make_caches(self._model, **self._kv_options)
        return RestoredPrompt(caches, list(tokens[found.n_tokens :]))

    def on_progress(self, tokens: Sequence[int], cache: kv.Caches) -> Callable[[int, int], None]:
        """A `prompt_progress_callback` for mlx-lm: saves a prompt while it is prefilled.

        `cache` is what `restore` returned for these tokens. On a model with states only this keeps
        a place before the end, from which the same prompt can go on again.
        """
        capture, last = self.restorer.open(tokens), len(tokens) - 1
        points: frozenset[int] = frozenset()

        def keep(n_done: int, n_rest: int) -> None:
            nonlocal points
            upto = len(tokens) - n_rest + n_done
            if not n_done:
                capture.start_at(upto)
                points = self.restorer.points(tokens, (), upto)
                capture.expect(points)
            elif upto <= last:  # the last call comes when the cache holds more
                kv.evaluate(cache)
                capture.capture(cache, upto, checkpoint=upto in points)

        return keep

    def commit(self, tokens: Sequence[int], cache: kv.Caches) -> None:
        """Save a cache that represents exactly these tokens. It can be restored at once."""
        kv.evaluate(cache)
        count = kv.token_count(cache)
        if count is not None and count != len(tokens):
            raise BadInput(
                f"The cache holds {count} tokens, but {len(tokens)} were given; pass its tokens."
            )
        self.restorer.open(tokens).finish(tokens, cache)
