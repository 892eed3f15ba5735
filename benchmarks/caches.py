"""Caches in the size and shape of real models, filled with random bits, without a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from keepwarm import kv
from keepwarm.prefix.blocks import BLOCK_TOKENS

BYTES_PER_NUMBER = 2  # bf16


@dataclass(frozen=True)
class Shape:
    """The caches of one architecture; every `global_every`-th layer keeps all tokens."""

    name: str
    n_layers: int
    n_heads: int  # of K and V
    width: int  # of one head
    window: int = 0  # 0: none
    global_every: int = 1

    def n_rows(self, layer: int, n_tokens: int) -> int:
        is_global = (layer + 1) % self.global_every == 0
        return n_tokens if is_global else min(self.window, n_tokens)

    @property
    def row_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.n_heads * self.width * BYTES_PER_NUMBER

    def live_bytes(self, n_tokens: int) -> int:
        return sum(self.n_rows(i, n_tokens) for i in range(self.n_layers)) * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block whose rows are all inside the window."""
        return self.n_layers * BLOCK_TOKENS * self.row_bytes

    def filled(self, n_tokens: int) -> kv.Caches:
        """Evaluated caches of exactly `n_tokens`, without spare buffer space."""
        return [self._layer(i, n_tokens) for i in range(self.n_layers)]

    def layout(self) -> kv.Layout:
        return kv.layout_of(self.filled(1))

    def _layer(self, layer: int, n_tokens: int) -> object:
        n_rows = self.n_rows(layer, n_tokens)
        tensors = {name: self._tensor(n_rows) for name in ("keys", "values")}
        mx.eval(tensors)
        is_global = (layer + 1) % self.global_every == 0
        scalars = {"offset": n_tokens} | ({} if is_global else {"keep": 0, "max_size": self.window})
        return kv.decode(
            kv.EncodedCache("KVCache" if is_global else "RotatingKVCache", tensors, scalars)
        )

    def _tensor(self, n_rows: int) -> mx.array:
        """One random block repeated; 4 GB of fresh random bits would take minutes."""
        times = -(-n_rows // BLOCK_TOKENS)
        rows = random_rows(self.n_heads, BLOCK_TOKENS, self.width)
        return mx.contiguous(mx.tile(rows, (1, 1, times, 1))[..., :n_rows, :])


@cache
def random_rows(n_heads: int, n_rows: int, width: int) -> mx.array:
    """K or V of a few tokens, the same bits in every process; read-only."""
    shape = (1, n_heads, n_rows, width)
    bits = np.random.default_rng(0).integers(0, 2**16, shape, dtype=np.uint16)
    return mx.array(bits).view(mx.bfloat16)


LLAMA_8B = Shape("llama-8b", n_layers=32, n_heads=8, width=128)
GEMMA_12B = Shape("gemma-3-12b", n_layers=48, n_heads=8, width=256, window=1024, global_every=6)
SMALL = Shape("small", n_layers=8, n_heads=8, width=128, window=300, global_every=2)
SHAPES = {shape.name: shape for shape in (LLAMA_8B, GEMMA_12B, SMALL)}
