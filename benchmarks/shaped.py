"""Time to first token of a long prompt on real shapes: cold, live, from memory, from disk.

python -m benchmarks.shaped --shape llama-8b --tokens 4096,16384,32768 --json FILE
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.requests.measure import drop_files
from benchmarks.requests.targets import unwound_by_signals
from benchmarks.shapes import SHAPES, build
from keepwarm import config, kv
from keepwarm.cache.restore.loading import Reader
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.cache.store import Budgets, Store
from keepwarm.engine.live import Live
from keepwarm.engine.prefill import Prefill
from keepwarm.models.load import Model
from keepwarm.store.disk.disk import DiskTier, Pages
from keepwarm.store.tiers import Tiers

SLICE = 2048
CHUNK = 1 << 20


@dataclass(frozen=True)
class Sample:
    shape: str
    n_tokens: int
    what: str
    n_bytes: int
    seconds: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return round(1000 * median(self.seconds), 1)


class Case:
    """One shape and one prompt length, stored in memory and on disk."""

    def __init__(self, model: Model, n_tokens: int, folder: Path, repeats: int) -> None:
        self.model = model
        self.repeats = repeats
        self.tokens = np.random.default_rng(0).integers(0, 250, n_tokens).tolist()
        self.samples: list[Sample] = []
        home = folder / "home"
        settings = config.load({"KEEPWARM_HOME": str(home)}, store=folder / "store")
        budgets = Budgets(memory_bytes=64 << 30, queue_bytes=64 << 30, min_free_disk_bytes=0)
        self.store = Store(budgets=budgets, settings=settings)
        self.restorer = self.store.attach(model.module, model.path).restorer
        self.restorer.rates.load_bytes_per_s = 1e15  # always load
        self.n_bytes = 0
        self._alone: dict[str, Restorer] = {}

    def run(self) -> list[Sample]:
        with self.store:
            self._time("prefill, nothing kept", self._cold, lambda: None)
            self.n_bytes = kv.live_bytes(self._saved())
            self._live()
            self._time("from memory", lambda: self._restored("memory"), mx.clear_cache)
            self._time("mx.array of the same bytes", self._copied(), mx.clear_cache)
            self.store.flush()
            files = self._files()
            self._time("from disk, pages warm", lambda: self._restored("disk"), mx.clear_cache)
            drop = partial(drop_files, files)

            def as_started() -> None:
                drop()
                disk = self._disk()
                disk.records.pages = Pages(disk.files)

            self._time("from disk, pages dropped", lambda: self._restored("disk"), as_started)
            self._time("plain read, pages dropped", lambda: _read(files, 1), drop)
            self._time("plain read, 8 threads", lambda: _read(files, 8), drop)
        return self.samples

    def _files(self) -> list[Path]:
        """The files that a restore from disk reads."""
        disk, reads = self._disk(), self._only("disk").plan([*self.tokens, 1]).point.reads
        return [disk.records.path_of(read.key, read.part) for read in reads]

    def _disk(self) -> DiskTier:
        ((_, disk),) = self._only("disk").tiers.named
        assert isinstance(disk, DiskTier)
        return disk

    def _time(self, what: str, work: Callable[[], object], before: Callable[[], object]) -> None:
        seconds = []
        for _ in range(self.repeats):
            before()
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        sample = Sample(self.model.name, len(self.tokens), what, self.n_bytes, tuple(seconds))
        print(f"{sample.shape} {sample.n_tokens:>7,} {what:<28} {sample.median_ms:>10,.1f} ms")
        self.samples.append(sample)

    def _cold(self) -> kv.Caches:
        return _prefilled(self.model, self.tokens, None)

    def _saved(self) -> kv.Caches:
        """Prefill again, saving every block."""
        capture = self.restorer.open(self.tokens)
        started = time.perf_counter()
        caches = _prefilled(
            self.model,
            self.tokens,
            lambda checkpoint, prefill: capture.capture(prefill.caches, prefill.n_done, checkpoint),
            self.restorer.points(self.tokens, (), 0),
        )
        capture.finish(self.tokens, caches)
        seconds = (time.perf_counter() - started,)
        self.samples.append(
            Sample(self.model.name, len(self.tokens), "prefill, all kept", 0, seconds)
        )
        return caches

    def _live(self) -> None:
        live, namespace = Live(1 << 40), self.restorer.namespace

        def put() -> None:
            live.put(namespace, self.tokens, self._from("memory"))

        def take() -> None:
            taken = live.take(namespace, [*self.tokens, 1])
            assert taken is not None
            self._first_token(taken.caches)

        self._time("live", take, put)

    def _restored(self, tier: str) -> None:
        """Restore from one tier and feed one token, so that the device has used the rows."""
        self._first_token(self._from(tier))

    def _from(self, tier: str) -> kv.Caches:
        restored = self._only(tier).restore([*self.tokens, 1])
        assert restored.n_tokens == len(self.tokens), restored.n_tokens
        assert restored.caches is not None
        return restored.caches

    def _only(self, tier: str) -> Restorer:
        """A restorer with one tier; its reader threads stay alive, as in a server."""
        if tier not in self._alone:
            restorer = self.restorer
            tiers = Tiers([named for named in restorer.tiers.named if named[0] == tier])
            self._alone[tier] = Restorer(
                restorer.namespace,
                restorer.layout,
                tiers,
                Reader(tiers, restorer.reader.slabs),
                restorer.writer,
                restorer.rates,
            )
        return self._alone[tier]

    def _first_token(self, caches: kv.Caches) -> None:
        mx.eval(self.model.module(mx.array([[1]]), cache=caches))

    def _copied(self) -> Callable[[], object]:
        piece = np.random.default_rng(0).integers(0, 2**16, 16 << 20, dtype=np.uint16)
        times = max(1, self.n_bytes // piece.nbytes)
        return lambda: mx.eval([mx.array(piece) for _ in range(times)])


def _prefilled(
    model: Model,
    tokens: list[int],
    keep: Callable[[bool, Prefill], None] | None,
    points: Iterable[int] = (),
) -> kv.Caches:
    caches = kv.make_caches(model.module)
    prefill = Prefill(model.module, tokens, caches, 0, points=points)
    while prefill.n_done < len(tokens):
        prefill.feed(SLICE)
        if keep is not None:
            keep(prefill.is_at_point, prefill)
    return prefill.caches


def _read(files: Sequence[Path], n_threads: int) -> None:
    def one(path: Path) -> None:
        buffer = bytearray(CHUNK)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                continue

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(one, files))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shaped", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--tokens", default="4096,16384,32768")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where to write blocks; default: a temporary directory"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with unwound_by_signals(), tempfile.TemporaryDirectory(dir=given.folder) as folder:
        model = build(given.shape, Path(folder))
        for n_tokens in map(int, given.tokens.split(",")):
            case = Case(model, n_tokens, Path(folder) / str(n_tokens), given.repeats)
            found += [vars(sample) | {"median_ms": sample.median_ms} for sample in case.run()]
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
