"""What decode steps of quantised models cost, by rows and by the way to multiply.

`python -m benchmarks.decode --json docs/results/decode.json` on a CUDA machine, then
`benchmarks.decode_page` for the tables; `--tiny` checks on any machine that it runs. `--cpu` is for
plain weights on a CPU: rows as one matrix and one by one, in processor time, which other programs
disturb least.

What counts is the pipelined step, as the engine runs them: the next is built and begun before the
tokens of this one are read. Ways are measured in turn, the figures that matter most first. A stage
that fails is reported whole, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    make_prompt_cache,
)
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from benchmarks.requests.targets import unwound_by_signals
from benchmarks.shapes import SHAPES, build
from keepwarm.models import row_products
from keepwarm.models.load import load
from keepwarm.models.row_products import (
    APART,
    MATRIX_ROWS,
    REPLACED,
    AlikeKernel,
    ExpertKernel,
    Kernel,
    Names,
    ProductByRows,
    Products,
    RowKernel,
    TensorKernel,
    by_shape,
    faster_way,
    row_counts,
)

CONTEXT = 1024
BATCHES = (16, 4, 64, 1, 2, 8, 32)  # those with goals first
DRAFTS = (1, 2, 4, 7, 8)  # tokens of one row
PAIRS = (8, 16, 32, 64, 128, 256, 512)  # of rows and experts
STEPS = 15
ENOUGH_S = 0.25  # of steps of one kind


class Report:
    """Results by stage; written after each, so that a time limit loses one stage only."""

    def __init__(self, file: Path | None, budget_s: float) -> None:
        device = mx.device_info()
        self.found: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "mlx": version("mlx"),
            "device": str(device.get("device_name", mx.default_device())),
        }
        self.failed: list[str] = []
        self._file = file
        self._end = time.perf_counter() + budget_s

    def stage(self, name: str, measure: Callable[[], Any], n_rows: int | None = None) -> None:
        label = name if n_rows is None else f"{name}, rows {n_rows}"
        started = time.perf_counter()
        if started > self._end:
            found: Any = note(label, "skipped: no time left")
        else:
            found = self._attempt(label, measure)
            print(f"--- {label}: {time.perf_counter() - started:.1f} s", flush=True)
        if n_rows is None:
            self.found[name] = found
        else:
            self.found.setdefault(name, {})[str(n_rows)] = found
        if self._file:
            self._file.write_text(json.dumps(self.found, indent=1) + "\n")

    def _attempt(self, label: str, measure: Callable[[], Any]) -> Any:
        try:
            return measure()
        except Exception:
            self.failed.append(label)
            print(f"{label} FAILED\n{traceback.format_exc()}", flush=True)
            return {"error": traceback.format_exc()}


def note(label: str, value: Any) -> Any:
    print(f"{label:<56} {value}", flush=True)
    return value


def median_ms(work: Callable[[], object]) -> float:
    for _ in range(2):  # compile kernels, fill caches
        work()
    times: list[float] = []
    while not _are_enough(times):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return round(median(times), 3)


def _are_enough(times: Sequence[float]) -> bool:
    return len(times) >= STEPS or (len(times) >= 3 and sum(times) > 1000 * ENOUGH_S)


# Ways to multiply


ROW_KERNELS: tuple[type[RowKernel], ...] = (AlikeKernel, TensorKernel)


class StandIn:
    """In place of a kernel where there is no CUDA."""

    def __init__(self, kernel: Any) -> None:
        self.name = kernel.name
        self.row_counts = kernel.row_counts
        self.is_exact = False
        self._ndim = kernel.ndim

    def can_multiply(self, module: Any) -> bool:
        return bool(module["weight"].ndim == self._ndim)

    def __call__(self, x: mx.array, module: Any, experts: mx.array | None = None) -> mx.array:
        if experts is None:
            return row_products.plain(x, module)
        result: mx.array = QuantizedSwitchLinear.__call__(module, x, experts)
        return result


def made(kernel: type[Kernel]) -> Any:
    return kernel() if mx.cuda.is_available() else StandIn(kernel)


FORCED: dict[str, Names] = {
    "flat": {MATRIX_ROWS: "flat"},
    "alike": {2: AlikeKernel.name, MATRIX_ROWS: "flat"},
    "tensor": {2: TensorKernel.name, TensorKernel.row_counts.stop: "flat"},
}


def _are_experts(modules: Mapping[str, Any]) -> bool:
    return any(type(module) is QuantizedSwitchLinear for module in modules.values())


class Ways:
    """Modules of a model that multiply in other ways, to be put in its place and back."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.expert_kernel = made(ExpertKernel)
        self.products = Products([*map(made, ROW_KERNELS), self.expert_kernel])
        found = by_shape(model)
        self.shapes = {shape: m for shape, m in found.items() if not _are_experts(m)}
        self.experts = {shape: m for shape, m in found.items() if _are_experts(m)}
        self._today = {path: m for modules in found.values() for path, m in modules.items()}
        self.ways: dict[str, dict[str, Any]] = {"today": self._today}
        for name, names in FORCED.items():
            self.ways[name] = {**self._today, **self._replaced(dict.fromkeys(self.shapes, names))}

    def switches(self) -> list[Any]:
        return [m for modules in self.experts.values() for m in modules.values()]

    def _replaced(self, names: Mapping[str, Names]) -> dict[str, Any]:
        return {
            path: REPLACED[type(m)](m, self._product(m, names[shape]))
            for shape, modules in (self.shapes | self.experts).items()
            for path, m in modules.items()
            if set(names.get(shape, {}).values()) - {"plain"}
        }

    def _product(self, module: Any, names: Names) -> ProductByRows:
        return ProductByRows(module["scales"].dtype, self.products.named, names)

    def add_chosen(self) -> dict[str, Any]:
        """By what is measured, as in idle time; without experts and with them."""
        started = time.perf_counter()
        names = {shape: self._chosen([*m.values()]) for shape, m in self.shapes.items()}
        of_experts = {shape: self._chosen([*m.values()]) for shape, m in self.experts.items()}
        took = note("measuring at load, s", round(time.perf_counter() - started, 2))
        for shape, chosen in (names | of_experts).items():
            note(f"chosen, {shape}", chosen)
        self.ways["chosen"] = {**self._today, **self._replaced(names)}
        if of_experts:
            self.ways["chosen and experts"] = self.ways["chosen"] | self._replaced(of_experts)
        return {"seconds": took, "names": names | of_experts}

    def _chosen(self, modules: Sequence[Any]) -> Names:
        return {n: faster_way(self.products, modules, n) for n in row_counts(modules[0])}

    def for_rows(self, n_rows: int) -> list[str]:
        """Without those that are another one of them at so many rows."""
        same = {"alike"} if n_rows >= MATRIX_ROWS else {"flat"}
        if n_rows == 1:
            same = set(FORCED)
        return [name for name in self.ways if name not in same]

    def use(self, name: str) -> None:
        self.model.update_modules(tree_unflatten(list(self.ways[name].items())))


# Whole steps


class Steps:
    """Decode steps of a model with a context of random keys and values."""

    def __init__(self, model: Any, config: Mapping[str, Any], context: int) -> None:
        self.model = model
        self._config = config
        self._context = context

    def caches(self, n_rows: int, *, masked: bool, seed: int = 0) -> list[Any]:
        """As the engine has them; without a mask, as if all rows had one length."""
        caches: list[Any] = make_prompt_cache(self.model)
        if masked and n_rows > 1:
            caches = [self._batched(cache, n_rows) for cache in caches]
        heads, size = self._config["num_key_value_heads"], self._config["head_dim"]
        dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32
        mx.random.seed(seed)
        for cache in caches:
            shape = (n_rows, heads, self._context, size)
            keys, values = (mx.random.normal(shape).astype(dtype) for _ in range(2))
            cache.update_and_fetch(keys, values)
        mx.eval([cache.state for cache in caches])
        return caches

    def _batched(self, cache: Any, n_rows: int) -> Any:
        if type(cache) is KVCache:
            return BatchKVCache([0] * n_rows)
        return BatchRotatingKVCache(cache.max_size, [0] * n_rows)

    def one(self, caches: list[Any], tokens: mx.array) -> mx.array:
        return mx.argmax(self.model(tokens, cache=caches)[:, -1:], axis=-1)

    def whole_ms(self, n_rows: int) -> float:
        """Each step begins when the one before it has ended."""
        caches, tokens = self.caches(n_rows, masked=True), mx.ones((n_rows, 1), mx.int32)
        return median_ms(lambda: mx.eval(self.one(caches, tokens)))

    def pipelined_ms(self, n_rows: int) -> tuple[float, float]:
        """As the engine runs: a step, and what of it the host took to build and enqueue."""
        caches, tokens = self.caches(n_rows, masked=True), mx.ones((n_rows, 1), mx.int32)
        mx.async_eval(tokens := self.one(caches, tokens))
        times: list[float] = []
        host: list[float] = []
        while not _are_enough(times[1:]):
            start = time.perf_counter()
            mx.async_eval(following := self.one(caches, tokens))
            begun = time.perf_counter()
            tokens.tolist()
            tokens = following
            host.append(1000 * (begun - start))
            times.append(1000 * (time.perf_counter() - start))
        mx.eval(tokens)
        return round(median(times[1:]), 3), round(median(host[1:]), 3)


def step_times(ways: Ways, steps: Steps, n_rows: int) -> dict[str, Any]:
    """Steps with all ways in turn, twice; the faster one counts."""
    names = ways.for_rows(n_rows)
    whole: dict[str, list[float]] = {name: [] for name in names}
    pipelined: dict[str, list[float]] = {name: [] for name in names}
    host: dict[str, list[float]] = {name: [] for name in names}
    for name in [*names, *names]:
        ways.use(name)
        whole[name].append(steps.whole_ms(n_rows))
        step, of_host = steps.pipelined_ms(n_rows)
        pipelined[name].append(step)
        host[name].append(of_host)
    ways.use("today")
    found = _rates(whole, n_rows)
    found["pipelined"] = {**_rates(pipelined, n_rows), "host ms": host}
    for kind, rates in {"pipelined": found["pipelined"], "one by one": found}.items():
        note(f"{kind}, rows {n_rows}, tokens/s", rates["tokens/s"])
        note(f"{kind}, rows {n_rows}, times today", rates["times today"])
    note(f"pipelined, rows {n_rows}, ms of the host", host)
    return found


def _rates(times: Mapping[str, Sequence[float]], n_rows: int) -> dict[str, Any]:
    best = {name: min(ms) for name, ms in times.items()}
    return {
        "ms": dict(times),
        "tokens/s": {name: round(1000 * n_rows / ms) for name, ms in best.items()},
        "times today": {name: round(best["today"] / ms, 2) for name, ms in best.items()},
    }


def draft_times(ways: Ways, steps: Steps) -> dict[str, Any]:
    """Milliseconds of a step of several tokens of one row, always at the same position."""
    found: dict[str, Any] = {}
    for name in ways.ways:
        ways.use(name)
        found[name] = {n: draft_ms(steps, n) for n in DRAFTS}
        note(f"one row, several tokens, ms, {name}", found[name])
    ways.use("today")
    return found


def draft_ms(steps: Steps, n_tokens: int) -> float:
    caches = steps.caches(1, masked=False)
    tokens = mx.ones((1, n_tokens), mx.int32)

    def step() -> None:
        mx.eval(steps.one(caches, tokens))
        for cache in caches:
            cache.trim(n_tokens)

    return median_ms(step)


def agreement(ways: Ways, steps: Steps, n_rows: int = 4, n_steps: int = 8) -> dict[str, Any]:
    """Logits of a batch against those of the same rows alone, of today's, and of the same again.

    If the same batch differs when it is repeated, the other figures have that much of noise.
    """
    found: dict[str, Any] = {}
    everyone = [list(range(n_rows))]
    reference = None
    for name in ways.ways:
        ways.use(name)
        together = _logits(steps, everyone, n_rows, n_steps)
        again = _logits(steps, everyone, n_rows, n_steps)
        alone = _logits(steps, [[row] for row in range(n_rows)], n_rows, n_steps)
        reference = together if reference is None else reference
        found[name] = {
            "batch and the same again": _apart(together, again),
            "batch and alone": _apart(together, alone),
            "batch and today's batch": _apart(together, reference),
        }
        note(f"agreement, {name}", found[name])
    ways.use("today")
    return found


def _logits(steps: Steps, groups: list[list[int]], n_rows: int, n_steps: int) -> mx.array:
    """(rows, steps, vocabulary), the rows of each group fed together."""
    results = []
    for rows in groups:
        caches = steps.caches(n_rows, masked=False, seed=7)
        for cache in caches:
            cache.keys, cache.values = cache.keys[mx.array(rows)], cache.values[mx.array(rows)]
        outputs = []
        for number in range(n_steps):
            tokens = mx.array([[3 + 7 * row + 11 * number] for row in rows])
            logits = steps.model(tokens, cache=caches).astype(mx.float32)
            mx.eval(logits)
            outputs.append(logits)
        results.append(mx.concatenate(outputs, axis=1))
    return mx.concatenate(results)


def _apart(one: mx.array, other: mx.array) -> dict[str, Any]:
    same = mx.argmax(one, -1) == mx.argmax(other, -1)
    return {
        "argmax equal": f"{int(same.sum())} of {same.size}",
        "max difference / std": round(float(mx.abs(one - other).max() / other.std()), 5),
    }


# Plain weights on a CPU


def cpu_times(name: str, most: int = 8) -> dict[str, Any]:
    """Milliseconds of processor time of one step, by rows and by whether rows are apart."""
    model = load(name)
    leaves: Any = tree_flatten(model.module.leaf_modules(), is_leaf=Module.is_module)
    together = [(path, m) for path, m in leaves if type(m) in APART]
    apart = [(path, APART[type(m)](m, most)) for path, m in together]
    size = model.config["hidden_size"] // model.config["num_attention_heads"]
    steps = Steps(model.module, {"head_dim": size, **model.config}, 256)
    ms: dict[str, dict[int, float]] = {"as one matrix": {}, "one by one": {}}
    for n_rows in (1, 2, 3, 4, most):
        caches = steps.caches(n_rows, masked=True)
        for _ in range(4):
            for (_, best), modules in zip(ms.items(), (together, apart), strict=True):
                model.module.update_modules(tree_unflatten(modules))
                best[n_rows] = min(best.get(n_rows, math.inf), processor_ms(steps, caches, n_rows))
        rates = {what: round(n_rows * best[1] / best[n_rows], 2) for what, best in ms.items()}
        note(f"rows {n_rows}, rate of one row", rates)
    return ms


def processor_ms(steps: Steps, caches: list[Any], n_rows: int) -> float:
    started = time.process_time()
    mx.eval(steps.one(caches, mx.ones((n_rows, 1), mx.int32)))
    return round(1000 * (time.process_time() - started), 1)


# Single products


def product_times(ways: Ways) -> dict[str, Any]:
    """Microseconds of one product among others, as measured at load."""
    found: dict[str, Any] = {}
    for shape, by_path in ways.shapes.items():
        modules = [*by_path.values()]
        found[shape] = {}
        for n_rows in row_counts(modules[0]):
            names = ["plain", *ways.products.for_rows(n_rows, modules[0])]
            times = {name: _product_us(ways, name, modules, n_rows) for name in names}
            found[shape][n_rows] = note(f"µs, {shape}, rows {n_rows}", times)
    return found


def _product_us(ways: Ways, name: str, modules: Sequence[Any], n_rows: int) -> float:
    n_used = len(modules[: row_products.MODULES])
    seconds = row_products.seconds(ways.products.named[name], modules, n_rows)
    return round(1e6 * seconds / n_used, 1)


def expert_times(ways: Ways) -> dict[int, Any]:
    """Microseconds of one product of rows and experts, sorted and not, by our kernel and by MLX."""
    switches = ways.switches()
    return {n: note(f"µs, experts, {n} pairs", _expert_times(ways, switches, n)) for n in PAIRS}


def _expert_times(ways: Ways, switches: Sequence[Any], n_pairs: int) -> dict[str, Any]:
    module = switches[0]
    x = mx.random.normal((n_pairs, 1, module.input_dims)).astype(module["scales"].dtype)
    experts = mx.random.randint(0, module.num_experts, (n_pairs,)).astype(mx.uint32)
    in_order = mx.sort(experts)
    mx.eval(x, experts, in_order)
    alike = [m for m in switches if m["weight"].shape == module["weight"].shape][:4]
    kernel = ways.expert_kernel
    products: dict[str, Callable[[Any], mx.array]] = {
        "as they come": lambda m: m(x, experts),
        "sorted": lambda m: m(x, in_order, sorted_indices=True),
        "sorted, not told": lambda m: m(x, in_order),
        "kernel": lambda m: kernel(x, m, experts),
        "kernel, sorted": lambda m: kernel(x, m, in_order),
    }
    found: dict[str, Any] = {name: _us_of_each(work, alike) for name, work in products.items()}
    kernels, today = products["kernel"](module), products["as they come"](module)
    found["difference"] = row_products.apart(kernels, today)
    return found


def _us_of_each(product: Callable[[Any], mx.array], modules: Sequence[Any]) -> float:
    ms = median_ms(lambda: mx.eval([product(module) for module in modules]))
    return round(1000 * ms / len(modules), 1)


# The program


def check_kernels() -> list[str]:
    """The arguments of every kernel, also where none can run."""
    linear: Any = QuantizedLinear(256, 48, bias=False)
    linear.set_dtype(mx.bfloat16)
    switch: Any = QuantizedSwitchLinear(256, 48, 4, bias=False)
    switch.set_dtype(mx.bfloat16)
    x = mx.zeros((3, 1, 256), mx.bfloat16)
    experts = mx.zeros((3,), mx.uint32)
    calls: dict[type[Kernel], Any] = {k: k.arguments(x, linear) for k in ROW_KERNELS}
    calls[ExpertKernel] = ExpertKernel.arguments(x, switch, experts)
    for kernel, call in calls.items():
        assert len(call["inputs"]) == len(kernel.inputs), kernel.name
        assert call["output_shapes"] == [(3, 1, 48)], kernel.name
    return [kernel.name for kernel in calls]


def measure(report: Report, shapes: Sequence[str], folder: Path, context: int) -> None:
    """Steps of all models first, row count by row count; what explains them last."""
    started: dict[str, tuple[Ways, Steps]] = {}

    def start(shape: str) -> dict[str, Any]:
        ways = Ways(build(shape, folder).module)
        started[shape] = ways, Steps(ways.model, SHAPES[shape], context)
        return {"modules": {s: len(m) for s, m in ways.shapes.items()}}

    report.stage("kernels", check_kernels)
    for shape in shapes:
        report.stage(f"{shape}: model", partial(start, shape))
    for shape, (ways, _) in started.items():
        report.stage(f"{shape}: chosen", ways.add_chosen)
    for n_rows in BATCHES:
        for shape, (ways, steps) in started.items():
            report.stage(f"{shape}: steps", partial(step_times, ways, steps, n_rows), n_rows)
    for shape, (ways, steps) in started.items():
        report.stage(f"{shape}: agreement", partial(agreement, ways, steps))
        if ways.switches():
            sixteen = partial(agreement, ways, steps, 16)  # enough pairs for the kernel
            report.stage(f"{shape}: agreement of 16 rows", sixteen)
        report.stage(f"{shape}: drafts", partial(draft_times, ways, steps))
        report.stage(f"{shape}: products", partial(product_times, ways))
        if ways.switches():
            report.stage(f"{shape}: experts", partial(expert_times, ways))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--shapes", default="llama-8b,qwen3-30b-a3b")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: a check that it runs")
    parser.add_argument("--cpu", metavar="MODEL", help="plain weights of this model, on a CPU")
    parser.add_argument("--budget", type=float, default=285.0, help="seconds; later stages wait")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    shapes = "tiny,tiny-experts" if given.tiny else given.shapes
    report = Report(given.json, given.budget)
    with unwound_by_signals(), tempfile.TemporaryDirectory() as folder:
        if given.cpu:
            report.stage("processor ms", partial(cpu_times, given.cpu))
        else:
            measure(report, shapes.split(","), Path(folder), 64 if given.tiny else CONTEXT)
    print("failed stages:", report.failed or "none", flush=True)
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
