"""One model that reads a context, keeps it exactly or by a codec, and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from benchmarks.price.codecs import Codec, rounded
from keepwarm import kv
from keepwarm.kv.kinds import Caches, Kind, kind_of, leaves
from keepwarm.models.load import Model

Tokens: TypeAlias = Sequence[int]
Floats: TypeAlias = NDArray[np.floating[Any]]

SLICE = 512
OPENING = "<|im_start|>user\n"
ASKING = "\n\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = (
    "What is this text about?",
    "Summarise the text in three sentences.",
    "Repeat the last lines of the text.",
    "Repeat the first lines of the text.",
    "List the names that appear in the text.",
    "Which part of the text is the most important, and why?",
    "Continue the text.",
)


class Scored(NamedTuple):
    """For each of the tokens that follow a context."""

    divergence: Floats  # of the exact distribution from the codec's, in nats
    agrees: NDArray[np.bool_]  # the likeliest token is the same
    exact_loss: Floats
    loss: Floats


class Reader:
    """A model with a context; every question about it starts from a copy."""

    def __init__(self, model: Model, tokens: Tokens) -> None:
        self._model, self.n_tokens = model, len(tokens)
        self._caches: Caches = kv.make_caches(model.module)
        for start in range(0, len(tokens), SLICE):
            self._logits(tokens[start : start + SLICE], self._caches)  # never evaluated
            kv.evaluate(self._caches)
        self._rounded: dict[Codec, Caches] = {}

    def logits(self, tokens: Tokens, codec: Codec | None) -> Floats:
        """After each of these tokens, all fed at once behind the context."""
        return _as_numpy(self._feed(tokens, self._copy(codec))[0])

    def answer(self, tokens: Tokens, n_tokens: int) -> list[int]:
        """The likeliest tokens, one after another, behind the exact context and these tokens."""
        caches, answer = self._copy(None), list[int]()
        fed = list(tokens)
        while len(answer) < n_tokens:
            fed = mx.argmax(self._feed(fed, caches)[:, -1], axis=-1).tolist()  # type: ignore[assignment]
            answer += fed
        return answer

    def _copy(self, codec: Codec | None) -> Caches:
        if codec is None:
            return kv.copy_caches(self._caches)
        if codec not in self._rounded:
            self._rounded[codec] = self._round(codec)
        return kv.copy_caches(self._rounded[codec])

    def _round(self, codec: Codec) -> Caches:
        """As if whole blocks had been stored by the codec and restored; windows and states are
        never rounded."""
        caches = kv.copy_caches(self._caches)
        for _, cache in leaves(caches):
            if kind_of(cache) is Kind.DELTA:
                _round_rows(cache, codec, self.n_tokens)
        return caches

    def _feed(self, tokens: Tokens, caches: Caches) -> mx.array:
        logits = self._logits(tokens, caches)
        mx.eval(logits, [cache.state for cache in caches])
        return logits

    def _logits(self, tokens: Tokens, caches: Caches) -> mx.array:
        found: mx.array = self._model.module(mx.array([list(tokens)]), cache=caches)
        return found


def _round_rows(cache: Any, codec: Codec, n_tokens: int) -> None:
    rows = codec.lossy_rows(n_tokens)
    for name, rounding in (("keys", codec.keys), ("values", codec.values)):
        held = getattr(cache, name)
        kept = _as_numpy(held).copy()
        kept[..., rows, :] = rounded(kept[..., rows, :], rounding)
        setattr(cache, name, mx.array(kept).astype(held.dtype))


def _as_numpy(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))


def score(reader: Reader, tokens: Tokens, exact: Floats, codec: Codec) -> Scored:
    """The tokens that follow, of which `exact` are the logits behind the exact context."""
    sure, found = log_softmax(exact[:-1]), log_softmax(reader.logits(tokens, codec)[:-1])
    wanted = np.array(tokens[1:])[:, None]
    return Scored(
        (np.exp(sure) * (sure - found)).sum(-1),
        sure.argmax(-1) == found.argmax(-1),
        -np.take_along_axis(sure, wanted, -1)[:, 0],
        -np.take_along_axis(found, wanted, -1)[:, 0],
    )


def log_softmax(logits: Floats) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def says_the_same(reader: Reader, question: Tokens, answer: Tokens, codec: Codec | None) -> bool:
    """Whether the likeliest tokens behind this context are the answer: it is fed at once, and
    nothing differs before the first token that does."""
    logits = reader.logits([*question, *answer[:-1]], codec)
    return bool((logits[len(question) - 1 :].argmax(-1) == answer).all())
