"""`python -m benchmarks.codes`: does a lossless code for keys and values pay on a shared tier?

The rows that a model computes for a text, as bf16 and as fp16: their high bytes, which are much
alike, are compressed, and the low bytes stay as they are. Needs the package `zstandard`, which
Keepwarm does not use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import mlx.core as mx
import numpy as np
import typer

from keepwarm import load
from keepwarm.kv import make_caches

TEXT = Path(__file__).parents[1] / "docs" / "serving.md"
ROUNDS = 5
RATES = (10e6, 50e6, 100e6, 200e6, 500e6)  # bytes in a second
DTYPES = {"bf16": mx.bfloat16, "fp16": mx.float16}
T = TypeVar("T")


@dataclass(frozen=True)
class Code:
    """How much smaller it makes rows, and bytes of them that one core does in a second."""

    gain: float
    encode: float
    decode: float

    @property
    def pays_below(self) -> float:
        """The rate of a tier below which loading and decoding takes less time than loading more."""
        return self.decode * (1 - 1 / self.gain)

    def time_share(self, rate: float) -> float:
        """Time to load with the code, on one core and one after the other, of that without."""
        return 1 / self.gain + rate / self.decode


def main(
    model: Annotated[str, typer.Option(help="Whose keys and values.")] = "smollm2",
    n_tokens: Annotated[int, typer.Option(help="Tokens of a text.")] = 256,
    level: Annotated[int, typer.Option(help="Of zstd.")] = 1,
) -> None:
    """Measure byte planes with zstd on the keys and values of a text, in processor time."""
    zstd, rows = _zstd(), _rows(model, n_tokens)
    for name, dtype in DTYPES.items():
        code = measure([_words(one, dtype) for one in rows], zstd, level)
        shares = ", ".join(f"{r / 1e6:.0f} MB/s {code.time_share(r):.2f}" for r in RATES)
        print(
            f"{name} zstd-{level}: gain {code.gain:.2f}, encodes {code.encode / 1e6:.0f} and "
            f"decodes {code.decode / 1e6:.0f} MB/s, pays below {code.pays_below / 1e6:.0f} MB/s"
        )
        print(f"  time to load, of that without: {shares}")


def measure(tensors: list[np.ndarray[Any, Any]], zstd: Any, level: int) -> Code:
    press, free = zstd.ZstdCompressor(level=level), zstd.ZstdDecompressor()

    def encode(words: np.ndarray[Any, Any]) -> tuple[bytes, np.ndarray[Any, Any]]:
        return press.compress((words >> 8).astype(np.uint8).data), words.astype(np.uint8)

    def decode(high: bytes, low: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        planes = np.empty((low.size, 2), np.uint8)
        planes[:, 0] = low
        plain = free.decompress(high, max_output_size=low.size)
        planes[:, 1] = np.frombuffer(plain, np.uint8)
        return planes.reshape(-1).view(np.uint16)

    coded = [encode(words) for words in tensors]
    for words, (high, low) in zip(tensors, coded, strict=True):
        if not np.array_equal(decode(high, low), words):
            raise ValueError("the code has changed a row")
    n_bytes = sum(words.nbytes for words in tensors)
    encode_s = _seconds(lambda: [encode(words) for words in tensors])
    decode_s = _seconds(lambda: [decode(*one) for one in coded])
    n_coded = sum(len(high) + low.nbytes for high, low in coded)
    return Code(n_bytes / n_coded, n_bytes / encode_s, n_bytes / decode_s)


def _zstd() -> Any:
    try:
        return import_module("zstandard")
    except ImportError as error:
        raise SystemExit("This needs zstandard; install it: pip install zstandard.") from error


def _rows(name: str, n_tokens: int) -> list[mx.array]:
    """Keys and values of every layer, which must be plain attention."""
    model = load(name)
    tokens = model.tokenizer.encode(TEXT.read_text())[:n_tokens]
    caches = make_caches(model.module)
    model.module(mx.array([tokens]), cache=caches)
    return [rows[:, :, : len(tokens)] for one in caches for rows in (one.keys, one.values)]


def _words(rows: mx.array, dtype: mx.Dtype) -> np.ndarray[Any, Any]:
    return np.array(rows.astype(dtype).view(mx.uint16)).reshape(-1)


def _seconds(work: Callable[[], T]) -> float:
    """Processor time of the fastest of some rounds."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


if __name__ == "__main__":
    typer.run(main)
