"""First tokens of a prompt on a slow disk: loaded, computed, and both at once from both ends.

`python -m benchmarks.meeting --shape llama-8b --tokens 32768` on a GPU. With `--pace 500` a tiny
model takes the time of a device that computes so many tokens a second, of 128 KiB each: so a busy
machine shows how both meet, if not how they disturb each other.
"""

from __future__ import annotations

import json as jsons
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import numpy as np
import typer

from benchmarks.remote.engines import engine_at, first_ms
from benchmarks.remote.throttled import AlwaysLoad
from benchmarks.requests.measure import describe_machine
from benchmarks.shapes import SHAPES, build, make_tokenizer
from keepwarm.cache.restore.loading import Reader
from keepwarm.engine.admission import kv_bytes
from keepwarm.engine.engine import Engine
from keepwarm.models.load import Model
from keepwarm.prefix.blocks import BlockKey
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Part, ReadBuffer, RecordView
from keepwarm.store.tiers import DISK, Tiers

RATES = (50, 500, 3000)  # MB/s
PACED_BYTES = 128 << 10  # of a token
GOAL = 1.15
MB = 1e6


class ThrottledDisk:
    """Reads one record after another, so many bytes a second."""

    def __init__(self, disk: Any, bytes_per_s: float) -> None:
        self._disk, self._bytes_per_s = disk, bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def visit(
        self, key: BlockKey, part: Part, use: Callable[[RecordView], None], buffer: ReadBuffer
    ) -> bool:
        taken_s = self._disk.have([key])[key].n_bytes / self._bytes_per_s
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + taken_s
            left_s = self._free_at - time.perf_counter()
        time.sleep(left_s)
        return bool(self._disk.visit(key, part, use, buffer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


class PacedModel:
    """Computes no more than so many tokens a second."""

    def __init__(self, model: Any, tokens_per_s: float) -> None:
        self.model, self._tokens_per_s = model, tokens_per_s

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        began = time.perf_counter()
        out: mx.array = self.model(inputs, *args, **kwargs)
        mx.eval(out)
        left_s = inputs.size / self._tokens_per_s - (time.perf_counter() - began)
        time.sleep(max(0.0, left_s))
        return out

    def __getattr__(self, name: str) -> Any:
        if name == "model" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.model, name)


@dataclass(frozen=True)
class Row:
    """Medians of first tokens in ms; `bound_ms` is what loading and computing take at once, if
    neither disturbs the other."""

    mb_per_s: int
    n_tokens: int
    load_ms: float
    compute_ms: float
    both_ms: float
    n_loaded: int

    @property
    def bound_ms(self) -> float:
        return 1 / (1 / self.load_ms + 1 / self.compute_ms)

    @property
    def holds(self) -> bool:
        """Where less than a tenth is to be gained, it is as quick as the better of the two."""
        better_ms = min(self.load_ms, self.compute_ms)
        goal_ms = self.bound_ms if self.bound_ms < 0.9 * better_ms else better_ms
        return self.both_ms <= GOAL * goal_ms

    def __str__(self) -> str:
        return (
            f"{self.mb_per_s:>4} MB/s  {self.n_tokens:,} tokens  load {self.load_ms:8.0f} ms  "
            f"compute {self.compute_ms:8.0f} ms  both {self.both_ms:8.0f} ms "
            f"({self.n_loaded:,} loaded)  {self.both_ms / self.bound_ms:.2f} times the bound of "
            f"{self.bound_ms:.0f} ms  {'yes' if self.holds else 'NO'}"
        )


def main(
    shape: Annotated[str, typer.Option(help="Of the model.")] = "small",
    tokens: Annotated[int, typer.Option(help="Of the prompt.")] = 6000,
    pace: Annotated[float, typer.Option(help="Tokens a second of a tiny model.")] = 0.0,
    tiny: Annotated[bool, typer.Option("--tiny", help="Few and small: a check.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
) -> None:
    shape, tokens = ("tiny", 2500) if tiny else (shape, tokens)
    rounds = 1 if tiny or pace else 3
    with tempfile.TemporaryDirectory(prefix="keepwarm-meeting-") as name:
        found = list(measure(Path(name), "least" if pace else shape, tokens, rounds, pace))
    if json is not None:
        rows = [asdict(row) | {"bound_ms": row.bound_ms, "holds": row.holds} for row in found]
        made = {"shape": shape, "pace": pace, "machine": describe_machine(), "results": rows}
        json.write_text(jsons.dumps(made, indent=1) + "\n")


def measure(
    folder: Path, shape: str, n_tokens: int, rounds: int, pace: float = 0.0
) -> Iterator[Row]:
    built = build(shape, folder / "model", quantised=mx.default_device() == mx.gpu)
    tokenizer = make_tokenizer(shape, folder / "tokenizer")
    module = PacedModel(built.module, pace) if pace else built.module
    model = Model(built.name, built.path, module, tokenizer, {}, built.n_context)
    drawn = np.random.default_rng(1).integers(0, SHAPES[shape]["vocab_size"], n_tokens)
    prompt = [int(token) for token in drawn]
    with engine_at(model, folder / "home") as engine:
        first_ms(engine, prompt, Policy.DURABLE)
        layout = engine.lane_of().restorer.layout
        shrunk = kv_bytes(layout, n_tokens) / n_tokens / PACED_BYTES if pace else 1.0
        for mb_per_s in RATES:
            row = _row(engine, prompt, mb_per_s, rounds, shrunk)
            print(row, flush=True)
            yield row


def _row(engine: Engine, prompt: Sequence[int], mb_per_s: int, rounds: int, shrunk: float) -> Row:
    """One after another in each round: so a machine that is busy now and then does not matter."""
    load, compute, both, loaded = [], [], [], []
    with _throttled(engine, mb_per_s * MB * shrunk):
        for _ in range(rounds):
            compute.append(_first_ms(engine, prompt, Policy.NO_STORE)[0])
            taken_ms, n_reused = _first_ms(engine, prompt, Policy.READ_WRITE)
            both.append(taken_ms)
            loaded.append(n_reused)
            with _patient(engine):
                load.append(_first_ms(engine, prompt, Policy.READ_WRITE)[0])
    load_ms, compute_ms, both_ms = map(statistics.median, (load, compute, both))
    n_loaded = int(statistics.median(loaded))
    return Row(mb_per_s, len(prompt), load_ms, compute_ms, both_ms, n_loaded)


def _first_ms(engine: Engine, prompt: Sequence[int], policy: Policy) -> tuple[float, int]:
    engine.wait_until_saved()
    engine.clear()
    taken_ms, receipt = first_ms(engine, prompt, policy)
    return taken_ms, receipt.cached_tokens


@contextmanager
def _throttled(engine: Engine, bytes_per_s: float) -> Iterator[None]:
    restorer = engine.lane_of().restorer
    disk = next(tier for name, tier in restorer.tiers.named if name == DISK)
    tier: Any = ThrottledDisk(disk, bytes_per_s)
    before = restorer.reader
    restorer.reader = Reader(Tiers([(DISK, tier)]), before.slabs)
    yield
    restorer.reader.close()
    restorer.reader = before


@contextmanager
def _patient(engine: Engine) -> Iterator[None]:
    """Computing seems to take for ever, so that all is loaded."""
    restorer = engine.lane_of().restorer
    before = restorer.rates
    restorer.rates = AlwaysLoad(**vars(before))
    yield
    restorer.rates = before


if __name__ == "__main__":
    typer.run(main)
