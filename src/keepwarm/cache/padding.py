"""Which models' sequences may share a batch: verdicts of padding trials, kept between starts."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from keepwarm import kv
from keepwarm.cache.padding_trial import Passes, Verdict, try_padding
from keepwarm.device.memory import GIB, memories
from keepwarm.files import write_atomically
from keepwarm.models.catalog import n_context
from keepwarm.prefix.fingerprint import Identity, digest

LOG = logging.getLogger(__name__)

TRIAL = 1  # raise it if the trial changes: verdicts of older ones no longer hold
MAX_BYTES = 2 * GIB


@dataclass(frozen=True)
class KnownVerdict:
    """A verdict, and the model and version it holds for."""

    model: str
    mlx_lm: str
    verdict: Verdict


class PaddingBook:
    """The verdicts of all models, in a small file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _read(path)

    def get(self, key: str) -> Verdict | None:
        return self._known[key].verdict if key in self._known else None

    def put(self, key: str, known: KnownVerdict, *, keep: bool) -> None:
        """Without `keep` it holds for this process only."""
        self._known[key] = known
        if not keep:
            return
        kept = {**_read(self._path), key: known}  # other processes write it too
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps({k: asdict(v) for k, v in kept.items()}))
        except OSError:
            return  # best effort: the next start tries again

    def alone(self) -> list[KnownVerdict]:
        """Models whose sequences must not share a batch."""
        return [known for known in self._known.values() if not known.verdict.shares]


def padding_book(home: Path) -> PaddingBook:
    return PaddingBook(home / "padding.json")


def _read(path: Path) -> dict[str, KnownVerdict]:
    try:
        known = json.loads(path.read_text())
        return {
            key: KnownVerdict(one["model"], one["mlx_lm"], Verdict(**one["verdict"]))
            for key, one in known.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


class RowSharing:
    """Whether sequences of one model, with one set of KV options, may share a batch."""

    def __init__(
        self,
        model: Any,
        kv_options: Mapping[str, Any],
        identity: Identity,
        source: Path | str,
        book: PaddingBook,
    ) -> None:
        self._model = model
        self._kv_options = kv_options
        self._name = str(source)
        self._book = book
        self._version = importlib.metadata.version("mlx-lm")
        self._key = digest([asdict(replace(identity, salt="")), self._version, TRIAL])
        self.can_batch = kv.can_batch(self._make())  # as far as the caches' classes say
        self._trial: Passes[Verdict] | None = None

    @property
    def is_decided(self) -> bool:
        return not self.can_batch or self._book.get(self._key) is not None

    @property
    def allowed(self) -> bool | None:
        """None if it is not known yet."""
        if not self.can_batch:
            return False
        verdict = self._book.get(self._key)
        return None if verdict is None else verdict.shares

    def run(self) -> bool:
        """Decide at once."""
        while not self.is_decided:
            self.step()
        return bool(self.allowed)

    def step(self) -> None:
        """Run the model once; on the last pass the verdict is known."""
        if self._trial is None:
            free_bytes = memories().arrays.free_bytes()
            self._trial = try_padding(
                self._model, self._make, min(MAX_BYTES, free_bytes // 8), _n_positions(self._model)
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
        self._book.put(self._key, KnownVerdict(self._name, self._version, verdict), keep=keep)
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
