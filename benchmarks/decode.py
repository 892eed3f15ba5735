"""What decode steps of quantised models cost, by rows, and where the time goes.

`python -m benchmarks.decode --json FILE` takes under five minutes on a CUDA machine; `--tiny`
checks on any machine that it runs. Ways to multiply are measured in turn. A stage that fails is
reported whole, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
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

from benchmarks.kernels import AlikeKernel, ExpertKernel, FourWarps, SixteenWarps
from benchmarks.shapes import SHAPES, build
from keepwarm.models import row_products
from keepwarm.models.product_kernels import Kernel, TensorKernel
from keepwarm.models.row_products import (
    REPLACED,
    ROW_COUNTS,
    Names,
    Product,
    ProductByRows,
    Products,
    by_shape,
    share,
)

CONTEXT = 1024
BATCHES = (1, 2, 4, 8, 16, 32, 64)
DRAFTS = (1, 2, 3, 4, 5, 8)  # tokens of one row
PAIRS = (8, 16, 32, 64, 128, 256, 512)  # of rows and experts
STEPS = 15
ENOUGH_S = 0.6  # of steps of one kind
COMPILED = ("today", "tensor", "tensor and experts")
ALSO_UNMASKED = ("today", "flat", "tensor", "tensor and experts", "chosen")


class RowSwitch(QuantizedSwitchLinear):  # type: ignore[misc]
    """The same module, that multiplies up to so many pairs of rows and experts by our kernel."""

    def __init__(self, switch: Any, kernel: ExpertKernel, most: int) -> None:
        Module.__init__(self)
        share(switch, self)
        self._kernel = kernel
        self._most = most

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        if indices.size > self._most:
            return super().__call__(x, indices, sorted_indices)
        return self._kernel(x, self, indices)


class Report:
    """Results by stage; written after each, so that a time limit loses one stage only."""

    def __init__(self, file: Path | None, budget_s: float) -> None:
        self.found: dict[str, Any] = {
            "mlx": version("mlx"),
            "device": str(mx.default_device()),
            "device_info": {name: str(value) for name, value in mx.device_info().items()},
        }
        self._file = file
        self._end = time.perf_counter() + budget_s

    def stage(self, name: str, measure: Callable[[], Any]) -> None:
        if time.perf_counter() > self._end:
            self.found[name] = "skipped: no time left"
            print(name, "skipped: no time left", flush=True)
            return
        started = time.perf_counter()
        try:
            self.found[name] = measure()
        except Exception:
            self.found[name] = {"error": traceback.format_exc()}
            print(f"{name} FAILED\n{traceback.format_exc()}", flush=True)
        print(f"--- {name}: {time.perf_counter() - started:.1f} s", flush=True)
        if self._file:
            self._file.write_text(json.dumps(self.found, indent=1))


def note(label: str, value: Any) -> Any:
    print(f"{label:<64} {value}", flush=True)
    return value


def median_ms(work: Callable[[], object]) -> float:
    for _ in range(2):  # compile kernels, fill caches
        work()
    times: list[float] = []
    while len(times) < STEPS and (len(times) < 3 or sum(times) < 1000 * ENOUGH_S):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return round(median(times), 3)


# Ways to multiply


ROW_KERNELS = (TensorKernel, FourWarps, SixteenWarps, AlikeKernel)


class StandIn:
    """In place of a kernel where there is no CUDA."""

    def __init__(self, kernel: Any) -> None:
        self.name = kernel.name
        self.max_rows = getattr(kernel, "max_rows", 0)

    def can_multiply(self, _dtype: mx.Dtype, _module: Any) -> bool:
        return True

    def __call__(self, x: mx.array, module: Any, experts: mx.array | None = None) -> mx.array:
        if experts is None:
            return row_products.plain(x, module)
        result: mx.array = QuantizedSwitchLinear.__call__(module, x, experts)
        return result


def made(kernel: type[Kernel]) -> Any:
    return kernel() if mx.cuda.is_available() else StandIn(kernel)


FLAT: Names = {1: "plain", **dict.fromkeys(range(2, 8), "padded"), 8: "flat"}
FORCED: dict[str, Names] = {
    "flat": FLAT,
    "tensor": {32: TensorKernel.name, 64: "flat"},
    "tensor to 8": {8: TensorKernel.name, 9: "flat"},
    "alike": {**FLAT, **dict.fromkeys(range(1, 8), AlikeKernel.name)},
}


class Ways:
    """Modules of a model that multiply in other ways, to be put in its place and back."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.products = Products([made(kernel) for kernel in ROW_KERNELS])
        self.expert_kernel = made(ExpertKernel)
        self.shapes = by_shape(model)
        linears = {path: m for modules in self.shapes.values() for path, m in modules.items()}
        self._today = linears | self._switches()
        self.ways: dict[str, dict[str, Any]] = {"today": self._today}
        for name, names in FORCED.items():
            self.ways[name] = {**self._today, **self._replaced(dict.fromkeys(self.shapes, names))}
        self._add_experts()

    def _switches(self) -> dict[str, Any]:
        leaves: Any = tree_flatten(
            self.model.leaf_modules(), is_leaf=lambda leaf: hasattr(leaf, "leaf_modules")
        )
        return {path: module for path, module in leaves if type(module) is QuantizedSwitchLinear}

    def _replaced(self, names: Mapping[str, Names]) -> dict[str, Any]:
        return {
            path: REPLACED[type(m)](m, self._product(m, names[shape]))
            for shape, modules in self.shapes.items()
            for path, m in modules.items()
        }

    def _product(self, module: Any, names: Names) -> ProductByRows:
        return ProductByRows(module["scales"].dtype, self.products.named, names)

    def _add_experts(self) -> None:
        switches = self._switches()
        if not switches:
            return
        experts = {path: RowSwitch(m, self.expert_kernel, 512) for path, m in switches.items()}
        self.ways["tensor and experts"] = {**self.ways["tensor"], **experts}
        self.ways["flat and experts"] = {**self.ways["flat"], **experts}

    def add_chosen(self) -> dict[str, Any]:
        """By what is measured, as at load."""
        production = Products([made(TensorKernel)])
        started = time.perf_counter()
        names = {
            shape: row_products.fastest(production, [*modules.values()])
            for shape, modules in self.shapes.items()
        }
        took = time.perf_counter() - started
        self.ways["chosen"] = {**self._today, **self._replaced(names)}
        return {"seconds": note("measuring at load, s", round(took, 2)), "names": names}

    def use(self, name: str) -> None:
        self.model.update_modules(tree_unflatten(list(self.ways[name].items())))


# Single products


def product_times(ways: Ways, row_counts: Sequence[int]) -> dict[str, Any]:
    """Microseconds of one product, in a chain where each waits for the one before."""
    found: dict[str, Any] = {}
    for shape, by_path in ways.shapes.items():
        modules = [*by_path.values()]
        found[shape] = {"chain alone": us_of(nothing, modules, 1)}
        for n_rows in row_counts:
            names = [*ways.products.for_rows(n_rows, modules[0])]
            times = {n: us_of(ways.products.named[n], modules, n_rows) for n in names}
            found[shape][n_rows] = note(f"µs, {shape}, rows {n_rows}", times)
    return found


def nothing(x: mx.array, _module: Any) -> mx.array:
    return x


def us_of(product: Product, modules: Sequence[Any], n_rows: int) -> Any:
    try:
        used = len(modules[: row_products.MODULES])
        return round(1e6 * row_products.seconds(product, modules, n_rows) / used, 1)
    except Exception as error:
        print(error, flush=True)
        return f"failed: {str(error)[:2000]}"


def equality(ways: Ways) -> dict[str, Any]:
    """Rows against MLX's product of one row, and both against fp32."""
    found = {}
    for shape, by_path in ways.shapes.items():
        module = next(iter(by_path.values()))
        found[shape] = {
            n_rows: {name: compared(ways, name, module, n_rows) for name in names}
            for n_rows in (1, 3, 4, 7, 8, 16)
            if (names := ways.products.for_rows(n_rows, module))
        }
        for n_rows, results in found[shape].items():
            note(f"equality, {shape}, rows {n_rows}", results)
    return found


def compared(ways: Ways, name: str, module: Any, n_rows: int) -> Any:
    try:
        return _compared(ways.products.named[name], module, n_rows)
    except Exception as error:
        return f"failed: {str(error)[:2000]}"


def _compared(product: Product, module: Any, n_rows: int) -> dict[str, Any]:
    scales = module["scales"]
    mx.random.seed(n_rows)
    n_inputs = scales.shape[-1] * module.group_size
    x = mx.random.normal((n_rows, 1, n_inputs)).astype(scales.dtype)
    rows = product(x, module)
    alone = mx.concatenate([row_products.plain(x[i : i + 1], module) for i in range(n_rows)])
    own = mx.concatenate([product(x[i : i + 1], module) for i in range(n_rows)])
    biases = module.get("biases")
    weights = mx.dequantize(
        module["weight"], scales, biases, module.group_size, module.bits, module.mode
    )
    exact = x.astype(mx.float32) @ weights.astype(mx.float32).T

    def distance(result: mx.array) -> float:
        return float(mx.abs(result.astype(mx.float32) - exact).max() / exact.std())

    return {
        "equal to one row of MLX": bool(mx.array_equal(rows, alone)),
        "equal to its own row alone": bool(mx.array_equal(rows, own)),
        "argmax equal": bool(mx.array_equal(mx.argmax(rows, -1), mx.argmax(alone, -1))),
        "max error": round(distance(rows), 5),
        "max error of MLX's row": round(distance(alone), 5),
    }


def expert_times(ways: Ways) -> dict[int, Any]:
    """Microseconds of one product with experts, by pairs of rows and experts."""
    switches = [*ways.ways["today"].values()]
    switches = [m for m in switches if isinstance(m, QuantizedSwitchLinear)]
    return {n: note(f"µs, experts, {n} pairs", _expert_times(ways, switches, n)) for n in PAIRS}


def _expert_times(ways: Ways, switches: Sequence[Any], n_pairs: int) -> dict[str, Any]:
    module = switches[0]
    x = mx.random.normal((n_pairs, 1, module.input_dims)).astype(module["scales"].dtype)
    experts = mx.random.randint(0, module.num_experts, (n_pairs,)).astype(mx.uint32)
    in_order = mx.sort(experts)
    mx.eval(x, experts, in_order)
    alike = [m for m in switches if m["weight"].shape == module["weight"].shape][:4]
    products: dict[str, Callable[[Any], mx.array]] = {
        "as they come": lambda m: m(x, experts),
        "sorted": lambda m: m(x, in_order, sorted_indices=True),
        "sorted, not told": lambda m: m(x, in_order),
    }
    kernel = ways.expert_kernel
    products["kernel"] = lambda m: kernel(x, m, experts)
    products["kernel, sorted"] = lambda m: kernel(x, m, in_order)
    found: dict[str, Any] = {}
    for name, product in products.items():
        found[name] = _attempt(lambda product=product: us_of_each(product, alike))  # type: ignore[misc]
    found["difference"] = _attempt(
        lambda: row_products.apart(products["kernel"](module), products["as they come"](module))
    )
    return found


def us_of_each(product: Callable[[Any], mx.array], modules: Sequence[Any]) -> float:
    ms = median_ms(lambda: mx.eval([product(module) for module in modules]))
    return round(1000 * ms / len(modules), 1)


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

    def ms(self, n_rows: int, *, masked: bool = True, n_tokens: int = 1) -> float:
        caches = self.caches(n_rows, masked=masked)
        tokens = mx.ones((n_rows, n_tokens), mx.int32)
        return median_ms(lambda: mx.eval(self.one(caches, tokens)))


def step_times(ways: Ways, steps: Steps, batches: Sequence[int], *, masked: bool) -> dict[int, Any]:
    """Milliseconds of a step and tokens per second by rows, ways in turn, twice."""
    found = {}
    for n_rows in batches:
        names = [name for name in ways.ways if masked or name in ALSO_UNMASKED]
        if n_rows > 8:
            names = [name for name in names if name not in ("alike", "tensor to 8")]
        times: dict[str, list[float]] = {name: [] for name in names}
        for name in chain(names, names):
            ways.use(name)
            times[name].append(steps.ms(n_rows, masked=masked))
        best = {name: min(ms) for name, ms in times.items()}
        found[n_rows] = {
            "ms": times,
            "tokens/s": {name: round(1000 * n_rows / ms) for name, ms in best.items()},
            "times today": {name: round(best["today"] / ms, 2) for name, ms in best.items()},
        }
        what = "steps" if masked else "steps without a mask"
        note(f"{what}, rows {n_rows}, tokens/s", found[n_rows]["tokens/s"])
        note(f"{what}, rows {n_rows}, times today", found[n_rows]["times today"])
    ways.use("today")
    return found


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
    """Logits of a batch against those of the same rows alone, and against today's."""
    found: dict[str, Any] = {}
    reference = None
    for name in ways.ways:
        ways.use(name)
        together = _logits(steps, [list(range(n_rows))], n_rows, n_steps)
        alone = _logits(steps, [[row] for row in range(n_rows)], n_rows, n_steps)
        reference = together if reference is None else reference
        found[name] = {
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


# Where the time of one row goes


def profile(ways: Ways, steps: Steps, config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _profile(ways, steps, config, name) for name in ways.ways}


def _profile(ways: Ways, steps: Steps, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    ways.use(name)
    modules = [m for m in ways.ways[name].values() if isinstance(m, QuantizedLinear)]
    whole = steps.ms(1)
    building, evaluating = _building_and_evaluating(steps)
    found = {
        "whole step": whole,
        "building the graph": building,
        "evaluating it": evaluating,
        "pipelined, as the engine runs": _pipelined(steps),
        "compiled": _attempt(lambda: _compiled(steps)) if name in COMPILED else None,
        "linear products alone, one after the other": _products_ms(modules, chained=True),
        "linear products alone, independent": _products_ms(modules, chained=False),
        "building these": _building_products(modules),
        "attention alone": _attention_ms(config, masked=False),
        "attention alone, array mask": _attention_ms(config, masked=True),
        "norms alone": _norms_ms(config),
    }
    ways.use("today")
    return dict(note(f"one row, ms, {name}", found))


def _attempt(measure: Callable[[], float]) -> Any:
    try:
        return measure()
    except Exception as error:
        return f"failed: {str(error)[:500]}"


def _building_and_evaluating(steps: Steps) -> tuple[float, float]:
    caches, tokens = steps.caches(1, masked=True), mx.ones((1, 1), mx.int32)
    building, evaluating = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        result = steps.one(caches, tokens)
        built = time.perf_counter()
        mx.eval(result)
        building.append(1000 * (built - start))
        evaluating.append(1000 * (time.perf_counter() - built))
    return round(median(building), 3), round(median(evaluating), 3)


def _pipelined(steps: Steps) -> float:
    """The next step is built and begun before the token of this one is read."""
    caches, token = steps.caches(1, masked=True), mx.ones((1, 1), mx.int32)
    times: list[float] = []
    mx.async_eval(token := steps.one(caches, token))
    for _ in range(2 * STEPS):
        start = time.perf_counter()
        mx.async_eval(following := steps.one(caches, token))
        token.item()
        token = following
        times.append(1000 * (time.perf_counter() - start))
    return round(median(times), 3)


def _compiled(steps: Steps) -> float:
    """The same position every time: a compiled function has no other."""
    caches, tokens = steps.caches(1, masked=True), mx.ones((1, 1), mx.int32)
    position = caches[0].offset
    state = [[cache.keys, cache.values] for cache in caches]

    def step(tokens: mx.array, state: Any) -> Any:
        for cache, (keys, values) in zip(caches, state, strict=True):
            cache.keys, cache.values, cache.offset = keys, values, position
        token = steps.one(caches, tokens)
        return token, [[cache.keys, cache.values] for cache in caches]

    compiled = mx.compile(step)
    return median_ms(lambda: mx.eval(compiled(tokens, state)))


def _product_chain(modules: Sequence[Any], *, chained: bool) -> Iterator[mx.array]:
    last: Any = 0.0
    for module in modules:
        scales = module["scales"]
        x = mx.ones((1, 1, scales.shape[-1] * module.group_size), scales.dtype)
        last = module(x + last if chained else x)[..., :1] * 0
        yield last


def _products_ms(modules: Sequence[Any], *, chained: bool) -> float:
    return median_ms(lambda: mx.eval([*_product_chain(modules, chained=chained)]))


def _building_products(modules: Sequence[Any]) -> float:
    return median_ms(lambda: [*_product_chain(modules, chained=True)])


def _attention_ms(config: Mapping[str, Any], *, masked: bool) -> float:
    heads, groups, size = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32
    keys = mx.random.normal((1, groups, CONTEXT, size)).astype(dtype)
    mask = mx.ones((1, 1, 1, CONTEXT), mx.bool_) if masked else None
    queries = mx.random.normal((1, heads, 1, size)).astype(dtype)
    mx.eval(keys, queries)

    def layers() -> None:
        last = queries
        for _ in range(config["num_hidden_layers"]):
            last = mx.fast.scaled_dot_product_attention(last, keys, keys, scale=0.1, mask=mask)
        mx.eval(last)

    return median_ms(layers)


def _norms_ms(config: Mapping[str, Any]) -> float:
    """Two for each layer: what an operation costs that computes nearly nothing."""
    dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32
    weight = mx.ones((config["hidden_size"],), dtype)
    x = mx.ones((1, 1, config["hidden_size"]), dtype)
    mx.eval(weight, x)

    def layers() -> None:
        last = x
        for _ in range(2 * config["num_hidden_layers"]):
            last = mx.fast.rms_norm(last, weight, 1e-5)
        mx.eval(last)

    return median_ms(layers)


# The program


def sources() -> dict[str, str]:
    """Text and arguments of every kernel, checked where none can run."""
    linear: Any = QuantizedLinear(256, 48, bias=False)
    linear.set_dtype(mx.bfloat16)
    switch: Any = QuantizedSwitchLinear(256, 48, 4, bias=False)
    switch.set_dtype(mx.bfloat16)
    x = mx.zeros((3, 1, 256), mx.bfloat16)
    experts = mx.zeros((3,), mx.uint32)
    found = {}
    for kernel in ROW_KERNELS:
        assert kernel.can_multiply(x.dtype, linear), kernel.name
        found[kernel.name] = _described(kernel, kernel.arguments(x, linear))
    found[ExpertKernel.name] = _described(ExpertKernel, ExpertKernel.arguments(x, switch, experts))
    return found


def _described(kernel: type[Kernel], arguments: Mapping[str, Any]) -> str:
    assert len(arguments["inputs"]) == len(kernel.inputs)
    (shape,) = arguments["output_shapes"]
    assert shape == (3, 1, 48), shape
    launch = {name: str(value) for name, value in arguments.items() if name != "inputs"}
    return f"{launch}\n{kernel.source}"


def measure(report: Report, shape: str, folder: Path, context: int) -> None:
    config = SHAPES[shape]
    started: list[Ways] = []

    def start() -> dict[str, Any]:
        ways = Ways(build(shape, folder).module)
        started.append(ways)
        return {"ways": [*ways.ways], "modules": {s: len(m) for s, m in ways.shapes.items()}}

    report.stage(f"{shape}: model", start)
    if not started:
        return
    (ways,) = started
    steps = Steps(ways.model, config, context)
    for name, work in {
        "products": lambda: product_times(ways, ROW_COUNTS),
        "equality": lambda: equality(ways),
        "experts": lambda: expert_times(ways) if "num_experts" in config else "none",
        "chosen": ways.add_chosen,
        "steps": lambda: step_times(ways, steps, BATCHES, masked=True),
        "profile": lambda: profile(ways, steps, config),
        "drafts": lambda: draft_times(ways, steps),
        "agreement": lambda: agreement(ways, steps),
        "steps without a mask": lambda: step_times(ways, steps, BATCHES, masked=False),
    }.items():
        report.stage(f"{shape}: {name}", work)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--shapes", default="llama-8b,qwen3-30b-a3b")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: a check that it runs")
    parser.add_argument("--budget", type=float, default=285.0, help="seconds; later stages wait")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    shapes = "tiny,tiny-experts" if given.tiny else given.shapes
    report = Report(given.json, given.budget)
    report.stage("kernels", sources)
    for shape in shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            measure(report, shape, Path(folder), 64 if given.tiny else CONTEXT)
        mx.clear_cache()
    failed = [name for name, found in report.found.items() if "error" in str(found)[:12]]
    print("failed stages:", failed or "none", flush=True)


if __name__ == "__main__":
    main()
