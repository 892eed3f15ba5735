"""Whether sequences that share a batch get what each of them gets alone.

Rows of a batch are padded on the left to one length. Some models take a cache slot for a position,
or align a mask with the wrong axis, and compute other numbers for padded rows without an error. So
before rows of a model share a batch, padded rows are compared with single ones: here, with caches
that are mixed from the rows of one short prompt. Long rows then cost one token a pass. Verdicts are
kept between starts.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, TypeVar

import mlx.core as mx

from keepwarm import kv
from keepwarm.device.memory import GIB, memories
from keepwarm.kv.batch import merge, trim
from keepwarm.kv.codec import copy_caches, encode, evaluate
from keepwarm.kv.kinds import Cache, Caches, Kind, is_empty, kind_of, leaves
from keepwarm.kv.make import make_caches
from keepwarm.models.catalog import n_context
from keepwarm.prefix.fingerprint import Identity, digest
from keepwarm.state_file import MACHINE, StateFile

LOG = logging.getLogger(__name__)

TRIAL = 1  # raise it if the trial changes: verdicts of older ones no longer hold
MAX_BYTES = 2 * GIB

PROMPT = [(7 * i + 3) % 97 for i in range(32)]
STEPS = ((11, 12, 13), (61, 62, 63))  # tokens fed to the first and to the second row
# Tokens of the longer row, and the padding of the other: odd, because a multiple of a model's block
# size would hide an error; and much less than the row, because sparse attention drops only blocks
# of long rows.
LENGTHS = {97: 65, 771: 71, 4111: 1111}
# Distances are total variation: the probability that two distributions disagree about. Over the
# model types of mlx-lm rows that are right are at most 6e-5 apart in fp32 and equal in bf16 (on a
# CPU), wrong ones at least 0.01 in both: docs/results/architectures.md.
MAX_APART_32 = 1e-3
MAX_APART_16 = 1e-2
MAX_RATIO = 5.0  # of padded rows to unpadded ones: kernels differ with the width of a batch
MAX_NOISE = 0.25

ROWS_HELD = 6  # both rows alone, and in a batch, which is copied once to grow

T = TypeVar("T")
Passes: TypeAlias = Generator[None, None, T]  # yields after each pass of the model, returns T


@dataclass(frozen=True)
class Verdict:
    """Whether rows may share a batch, and how far padded and unpadded rows are from single ones."""

    shares: bool
    padded: float
    unpadded: float
    n_tokens: int  # of the longest row compared


@dataclass(frozen=True)
class KnownVerdict:
    """A verdict, and the model and version it holds for."""

    model: str
    mlx_lm: str
    verdict: Verdict


class VerdictsFile:
    """The verdicts of all models, kept in the home directory."""

    def __init__(self, home: Path) -> None:
        self._file = StateFile(home / MACHINE, "padding", _verdicts_from_json, _verdicts_to_json)
        self._known = self._file.read()
        self._unsaved: dict[str, KnownVerdict] = {}

    def get(self, key: str) -> Verdict | None:
        return self._known[key].verdict if key in self._known else None

    def put(self, key: str, known: KnownVerdict, *, keep: bool) -> None:
        """Without `keep` it holds for this process only."""
        self._known[key] = known
        if keep:
            self._unsaved[key] = known

    def save(self) -> None:
        """Write what is to be kept; never on the engine's thread."""
        new = dict(self._unsaved)  # the engine's thread may add to it meanwhile
        if new:
            with suppress(OSError):  # the next call tries again
                self._file.change(lambda kept: {**kept, **new})
                for key in new:
                    self._unsaved.pop(key, None)

    def alone(self) -> list[KnownVerdict]:
        """Models whose sequences must not share a batch."""
        return [known for known in self._known.values() if not known.verdict.shares]


def _verdicts_from_json(kept: Mapping[str, Any]) -> dict[str, KnownVerdict]:
    return {
        key: KnownVerdict(one["model"], one["mlx_lm"], Verdict(**one["verdict"]))
        for key, one in kept.items()
    }


def _verdicts_to_json(known: Mapping[str, KnownVerdict]) -> dict[str, Any]:
    return {key: asdict(one) for key, one in known.items()}


class RowSharing:
    """Whether sequences of one model, with one set of KV options, may share a batch."""

    def __init__(
        self,
        model: Any,
        kv_options: Mapping[str, Any],
        identity: Identity,
        source: Path | str,
        verdicts: VerdictsFile,
        *,
        own_ends: bool = False,
    ) -> None:
        """`own_ends`: rows of its batches end where they end."""
        self._model = model
        self.own_ends = own_ends  # so each can take back a draft of its own
        self._kv_options = kv_options
        self._name = str(source)
        self._verdicts = verdicts
        self._version = importlib.metadata.version("mlx-lm")
        self._key = digest([asdict(replace(identity, salt="")), self._version, TRIAL, own_ends])
        self.can_batch = kv.can_batch(self._make())  # as far as the caches' classes say
        self._max_bytes = min(MAX_BYTES, memories().arrays.free_bytes() // 8)
        self._trial: Passes[Verdict] | None = None

    @property
    def is_decided(self) -> bool:
        return not self.can_batch or self._verdicts.get(self._key) is not None

    @property
    def allowed(self) -> bool | None:
        """None if it is not known yet."""
        if not self.can_batch:
            return False
        verdict = self._verdicts.get(self._key)
        return None if verdict is None else verdict.shares

    def step(self) -> None:
        """Run the model once; on the last pass the verdict is known."""
        if self._trial is None:
            self._trial = try_padding(
                self._model,
                self._make,
                self._max_bytes,
                _n_positions(self._model),
                own_ends=self.own_ends,
            )
        try:
            next(self._trial)
        except StopIteration as end:
            self._decide(end.value)
        except Exception as error:  # a model that takes no batch at all, or too little memory
            LOG.warning("%s fails in a batch (%s)", self._name, error)
            self._decide(Verdict(False, 1.0, 0.0, 0), keep=False)

    def _decide(self, verdict: Verdict, *, keep: bool = True) -> None:
        self._trial = None
        self._verdicts.put(self._key, KnownVerdict(self._name, self._version, verdict), keep=keep)
        if not verdict.shares:
            LOG.warning(
                "%s computes other numbers for padded rows than for single ones, so its "
                "sequences run alone (%.2g apart; mlx-lm %s)",
                self._name,
                verdict.padded,
                self._version,
            )

    def _make(self) -> kv.Caches:
        return kv.make_caches(self._model, **self._kv_options)


def _n_positions(model: Any) -> int:
    """Tokens that the model has positions for, as far as its arguments say."""
    arguments = vars(model.args) if hasattr(model, "args") else {}
    plain = {name: value for name, value in arguments.items() if isinstance(value, int | dict)}
    return n_context(plain)


def try_padding(
    model: Any,
    make: Callable[[], Caches],
    max_bytes: int,
    max_tokens: int = sys.maxsize,
    *,
    own_ends: bool = False,
) -> Passes[Verdict]:
    """Compare padded rows with single ones; `make` returns empty caches of the model.

    36 passes of one or two tokens after one of 32; the caches take about `max_bytes`.
    """
    source = make_caches(model)
    model(mx.array([PROMPT]), cache=source)
    evaluate(source)
    yield
    is_16_bit = any(array.dtype.size == 2 for cache in source for array in encode(cache).arrays())
    floor = MAX_APART_16 if is_16_bit else MAX_APART_32
    padded = unpadded = 0.0
    longest = min(max_tokens - len(STEPS[0]), max_bytes // (ROWS_HELD * _bytes_per_token(source)))
    lengths = {min(n, max(longest, min(LENGTHS))): padding for n, padding in LENGTHS.items()}
    for n, padding in lengths.items():
        rows = [_mixed(source, make(), size) for size in (n - min(padding, n * 2 // 3), n)]
        both = yield from _decode(model, rows, STEPS, own_ends)
        short = yield from _decode(model, rows[:1], STEPS[:1])
        long = yield from _decode(model, rows[1:], STEPS[1:])
        pair = yield from _decode(model, [rows[1], rows[1]], (STEPS[1], STEPS[1]), own_ends)
        unpadded = max(unpadded, _apart(pair, 0, long))
        padded = max(padded, _apart(both, 0, short), _apart(both, 1, long))
        shares = padded <= max(floor, MAX_RATIO * unpadded) and unpadded <= MAX_NOISE
        if not shares:
            return Verdict(False, padded, unpadded, n)
    return Verdict(True, padded, unpadded, n)


def _bytes_per_token(caches: Caches) -> int:
    rows = [leaf for _, leaf in leaves(caches) if kind_of(leaf) is not Kind.STATE]
    return max(1, sum(encode(leaf).n_bytes for leaf in rows) // len(PROMPT))


def _decode(
    model: Any,
    rows: Sequence[Caches],
    tokens: Sequence[Sequence[int]],
    own_ends: bool = False,
) -> Passes[list[mx.array]]:
    """Feed each row its tokens, one a pass; the probabilities (rows, vocabulary) after each.

    Where rows have their own ends each token has a wrong draft behind it, which is taken back.
    """
    caches = copy_caches(rows[0]) if len(rows) == 1 else merge(rows, own_ends=own_ends)
    found: list[mx.array] = []
    for fed in zip(*tokens, strict=True):
        if own_ends:
            logits = model(mx.array([[token, 0] for token in fed]), cache=caches)[:, 0, :]
            trim(caches, [1] * len(rows))
        else:
            logits = model(mx.array(fed)[:, None], cache=caches)[:, -1, :]
        found.append(mx.softmax(logits.astype(mx.float32), axis=-1))
        mx.eval(found[-1])
        yield
    return found


def _apart(steps: Sequence[mx.array], row: int, alone: Sequence[mx.array]) -> float:
    """The median distance of a row from the same sequence alone; infinite if not a number."""
    pairs = zip(steps, alone, strict=True)
    apart: list[Any] = [(0.5 * mx.abs(many[row] - one[0]).sum()).item() for many, one in pairs]
    return median(apart) if all(x <= 1.01 for x in apart) else float("inf")


def _mixed(source: Caches, empty: Caches, n_tokens: int) -> Caches:
    """Caches of `n_tokens`: rows mixed at random from those of the source, its states as they are.

    The same call gives the same rows, and rows of one length are the same in every layer's mix.
    """
    key = mx.random.key(n_tokens)
    weights = mx.random.normal((n_tokens, len(PROMPT)), key=key) / len(PROMPT) ** 0.5
    return evaluate([_mixed_layer(*pair, weights) for pair in zip(source, empty, strict=True)])


def _mixed_layer(source: Cache, empty: Cache, weights: mx.array) -> Cache:
    if is_empty(source):  # a layer that never uses its cache
        return empty
    kind = kind_of(source)
    if kind is Kind.COMPOSITE:
        parts = zip(source.caches, empty.caches, strict=True)
        return type(source)(*(_mixed_layer(*part, weights) for part in parts))
    if kind is Kind.STATE:
        return copy_caches([source])[0]
    rows = [_mix(weights, rows) for rows in encode(source).tensors.values()]
    # The last row alone: after a slice a window would hold more rows than it has.
    empty.update_and_fetch(*(x[..., :-1, :] for x in rows))
    empty.update_and_fetch(*(x[..., -1:, :] for x in rows))
    return empty


def _mix(weights: mx.array, rows: mx.array) -> mx.array:
    if not rows.shape[-1]:  # some caches hold keys only
        return mx.zeros((*rows.shape[:2], weights.shape[0], 0), rows.dtype)
    n_rows = rows.shape[2]  # fewer than the prompt in a small window
    return (weights[:, :n_rows] @ rows.astype(mx.float32)).astype(rows.dtype)
