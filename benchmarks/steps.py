"""`python -m benchmarks.steps`: what a decode step of a batch costs in MLX alone, without Keepwarm.

The same model, fed one token for each of 1, 2, 4 and 8 rows that all have equally long caches; the
batches take turns, so that they meet the same load. What they gain over one row is the most that
so many streams can. Beside it the same for two matrix products, which says whether the BLAS is the
reason.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from keepwarm import config
from keepwarm.models.load import load

ROWS = (1, 2, 4, 8)


def steps(module: Any, n_rows: int, n_context: int) -> Callable[[], None]:
    """A function that decodes one token for every row."""
    caches = make_prompt_cache(module)
    prompt = mx.random.randint(0, 1000, (n_rows, n_context))
    mx.eval(module(prompt, cache=caches)[:, -1])
    tokens = mx.zeros((n_rows, 1), mx.int32)

    def step() -> None:
        logits = module(tokens, cache=caches)[:, -1]
        mx.eval(mx.argmax(logits, axis=-1))

    return step


def products(weights: mx.array, n_rows: int) -> Callable[[], None]:
    """A function that multiplies so many rows with a layer's weights."""
    rows = mx.random.normal((n_rows, weights.shape[1]))
    mx.eval(rows)

    def product() -> None:
        mx.eval(rows @ weights.T)

    return product


class Cost(NamedTuple):
    wall_s: float
    processor_s: float  # of all threads; other programs disturb it least


def in_turn(works: Mapping[int, Callable[[], None]], samples: int) -> dict[int, Cost]:
    """The median of each; the first of each is not counted."""
    found: dict[int, list[Cost]] = {n_rows: [] for n_rows in works}
    for number in range(samples + 1):
        for n_rows, work in works.items():
            begun = Cost(time.perf_counter(), time.process_time())
            work()
            ended = Cost(time.perf_counter(), time.process_time())
            if number:
                spent = (after - before for before, after in zip(begun, ended, strict=True))
                found[n_rows].append(Cost(*spent))
    return {
        n_rows: Cost(*map(statistics.median, zip(*costs, strict=True)))
        for n_rows, costs in found.items()
    }


def show(what: str, costs: Mapping[int, Cost]) -> None:
    for n_rows, cost in costs.items():
        ms = [1000 * seconds for seconds in cost]
        gains = [n_rows * one / many for one, many in zip(costs[1], cost, strict=True)]
        print(
            f"{what:20} {n_rows} rows {ms[0]:8.2f} ms, processor {ms[1]:8.2f} ms: "
            f"{gains[0]:.2f} and {gains[1]:.2f} times the rate of one row"
        )


def widest(module: Any) -> mx.array:
    found: Any = tree_flatten(module.parameters(), destination={})
    matrices: list[mx.array] = [array for array in found.values() if array.ndim == 2]
    return max(matrices, key=lambda array: array.size)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("--model", default=config.load().model)
    parser.add_argument("--context", type=int, default=128, help="tokens in every row's cache")
    parser.add_argument("--samples", type=int, default=20)
    asked = parser.parse_args()
    module = load(asked.model).module
    show("decode step", in_turn({n: steps(module, n, asked.context) for n in ROWS}, asked.samples))
    for what, part in (("product, in a layer", module.layers[0]), ("product, largest", module)):
        weights = widest(part)
        show(what, in_turn({n: products(weights, n) for n in ROWS}, asked.samples))


if __name__ == "__main__":
    main()
