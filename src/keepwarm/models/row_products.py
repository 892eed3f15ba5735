"""How rows are multiplied by quantised weights, by what is fastest on this device.

mlx-lm's models give MLX a batch of n sequences as n matrices of one row. On CUDA that costs n times
one row; as one matrix of n rows, eight rows cost what one does. What is fastest for how many rows
is measured when a model is loaded, and kept between starts.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten

from keepwarm.device import kernels
from keepwarm.models.product_kernels import Quantized, RowKernel, TensorKernel
from keepwarm.state_file import MACHINE, StateFile

LOG = logging.getLogger(__name__)
TRIAL = 1  # raise it if kernels or the measurement change
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
MATRIX_ROWS = 8  # from here on MLX multiplies a matrix on CUDA, below it one row after the other
MARGIN = 0.95  # of the time of `plain`: another way has to be faster than this
REPEATS = 3
MODULES = 8  # more weights than the cache of a GPU holds, as in a model
MAX_APART = 0.1  # of the mean size of results; rounding makes a tenth of it, another order 1.4

Product: TypeAlias = Callable[[mx.array, Quantized], mx.array]
Names: TypeAlias = dict[int, str]  # of products, by the number of rows


def plain(x: mx.array, module: Quantized) -> mx.array:
    """As MLX's own modules multiply."""
    return mx.quantized_matmul(
        x,
        module["weight"],
        scales=module["scales"],
        biases=module.get("biases"),
        transpose=True,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


def flat(x: mx.array, module: Quantized) -> mx.array:
    """As one matrix."""
    product = plain(x.reshape(1, -1, x.shape[-1]), module)
    return product.reshape(*x.shape[:-1], -1)


def padded(x: mx.array, module: Quantized) -> mx.array:
    """As one matrix of eight rows, of which the last are zeros."""
    rows = x.reshape(1, -1, x.shape[-1])
    n_rows = rows.shape[1]
    rows = mx.pad(rows, [(0, 0), (0, MATRIX_ROWS - n_rows), (0, 0)])
    return plain(rows, module)[:, :n_rows].reshape(*x.shape[:-1], -1)


class Products:
    """The ways to multiply that this device has."""

    def __init__(self, row_kernels: Sequence[RowKernel] = ()) -> None:
        self._kernels = {kernel.name: kernel for kernel in row_kernels}
        self.named: dict[str, Product] = {"plain": plain, "flat": flat, "padded": padded}
        self.named |= self._kernels

    def for_rows(self, n_rows: int, module: Quantized) -> list[str]:
        """Those that may be fastest; all compute the same but for rounding."""
        found = ["plain"]
        if n_rows > 1:
            found.append("flat" if n_rows >= MATRIX_ROWS else "padded")
        for name, kernel in self._kernels.items():
            if n_rows <= kernel.max_rows and kernel.can_multiply(module["scales"].dtype, module):
                found.append(name)
        return found


class ProductByRows:
    """The way for every number of rows."""

    def __init__(self, dtype: mx.Dtype, named: Mapping[str, Product], names: Names) -> None:
        self._dtype = dtype
        counts = sorted(names)
        self._most = counts[-1]
        self._products = [
            named[names[counts[bisect_left(counts, n_rows)]]] for n_rows in range(self._most + 1)
        ]

    def __call__(self, x: mx.array, module: Quantized) -> mx.array:
        if x.dtype != self._dtype:
            return plain(x, module)
        n_rows = x.size // x.shape[-1]
        return self._products[min(n_rows, self._most)](x, module)


class RowLinear(QuantizedLinear):
    """The same module, with the same parameters, that multiplies as `product` does."""

    def __init__(self, linear: QuantizedLinear, product: ProductByRows) -> None:
        Module.__init__(self)
        share(linear, self)
        self._product = product

    def __call__(self, x: mx.array) -> mx.array:
        x = self._product(x, self)
        return x + self["bias"] if "bias" in self else x


class RowEmbedding(QuantizedEmbedding):
    """The same for embeddings that are the head too."""

    def __init__(self, embedding: QuantizedEmbedding, product: ProductByRows) -> None:
        Module.__init__(self)
        share(embedding, self)
        self._product = product

    def as_linear(self, x: mx.array) -> mx.array:
        return self._product(x, self)


REPLACED = {QuantizedLinear: RowLinear, QuantizedEmbedding: RowEmbedding}


def share(module: Any, copy: Any) -> None:
    """All that a module is: items are its parameters, attributes its options."""
    copy.__dict__.update(module.__dict__)
    dict.update(copy, module)


class ProductsFile:
    """What was fastest on this machine, kept in the home directory."""

    def __init__(self, home: Path) -> None:
        self._file: StateFile[dict[str, Any]] = StateFile(home / MACHINE, "products", dict)
        self._depends = [TRIAL, version("mlx"), mx.device_info().get("device_name")]

    def read(self) -> dict[str, Names]:
        """By shape; empty if it was measured with another device or another MLX."""
        kept = self._file.read()
        if kept.get("depends") != self._depends:
            return {}
        return {
            shape: {int(n_rows): name for n_rows, name in names.items()}
            for shape, names in kept["names"].items()
        }

    def add(self, names: Mapping[str, Names]) -> None:
        with suppress(OSError):  # the next start measures again
            both = {**self.read(), **names}
            self._file.change(lambda _: {"depends": self._depends, "names": both})


def speed_up(model: Module, home: Path) -> None:
    """Have the model's quantised products computed in the ways that are fastest here.

    Does nothing but on CUDA: Metal joins rows by itself, and on CPUs weights are not quantised.
    """
    if kernels.are_compiled():
        choose(model, Products([TensorKernel()]), ProductsFile(home))


def choose(model: Module, products: Products, kept: ProductsFile) -> None:
    """Measure what is not known yet, and replace the modules that can be faster."""
    known, shapes = kept.read(), by_shape(model)
    new = {
        shape: fastest(products, [*modules.values()])
        for shape, modules in shapes.items()
        if not _is_usable(known.get(shape), products)
    }
    if new:
        LOG.info("ways to multiply by quantised weights, by rows: %s", new)
        kept.add(new)
    for shape, modules in shapes.items():
        replace(model, modules, products, {**known, **new}[shape])


def _is_usable(names: Names | None, products: Products) -> bool:
    return bool(names) and set((names or {}).values()) <= products.named.keys()


def by_shape(model: Module) -> dict[str, dict[str, Quantized]]:
    """Its quantised modules by path, those of one shape together."""
    found: dict[str, dict[str, Quantized]] = defaultdict(dict)
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=Module.is_module)
    for path, module in leaves:
        if type(module) in REPLACED:
            found[_shape(module)][path] = module
    return found


def _shape(module: Quantized) -> str:
    inputs, outputs = _n_inputs(module), module["weight"].shape[0]
    dtype = str(module["scales"].dtype).removeprefix("mlx.core.")
    return f"{inputs} to {outputs}, {module.bits} bits, {module.group_size}, {module.mode}, {dtype}"


def replace(
    model: Module, modules: Mapping[str, Quantized], products: Products, names: Names
) -> None:
    if set(names.values()) == {"plain"}:
        return
    changed = []
    for path, module in modules.items():
        product = ProductByRows(module["scales"].dtype, products.named, names)
        changed.append((path, REPLACED[type(module)](module, product)))
    model.update_modules(tree_unflatten(changed))


def fastest(products: Products, modules: Sequence[Quantized]) -> Names:
    """The fastest way for each number of rows, by modules of one shape."""
    return {n_rows: _fastest(products, modules, n_rows) for n_rows in ROW_COUNTS}


def _fastest(products: Products, modules: Sequence[Quantized], n_rows: int) -> str:
    times = {"plain": seconds(plain, modules, n_rows)}
    for name in products.for_rows(n_rows, modules[0]):
        if name != "plain" and _is_right(products.named[name], modules[0], n_rows):
            times[name] = seconds(products.named[name], modules, n_rows)
    best = min(times, key=times.__getitem__)
    return best if times[best] < MARGIN * times["plain"] else "plain"


def _is_right(product: Product, module: Quantized, n_rows: int) -> bool:
    """Whether it runs here and its result is MLX's but for rounding."""
    x = mx.random.normal((n_rows, 1, _n_inputs(module)), key=mx.random.key(n_rows))
    x = x.astype(module["scales"].dtype)
    try:
        return apart(product(x, module), plain(x, module)) < MAX_APART
    except RuntimeError as error:  # a kernel that does not compile
        LOG.warning("a way to multiply by quantised weights is not used: %s", error)
        return False


def apart(result: mx.array, expected: mx.array) -> float:
    """The mean difference, of the mean size; not a number if a result is not."""
    result, expected = result.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.abs(result - expected).mean() / mx.abs(expected).mean())


def _n_inputs(module: Quantized) -> int:
    return int(module["scales"].shape[-1] * module.group_size)


def seconds(product: Product, modules: Sequence[Quantized], n_rows: int) -> float:
    """Of one product after the other, as decoding a batch computes them."""
    x = mx.ones((n_rows, 1, _n_inputs(modules[0])), modules[0]["scales"].dtype)
    times = [_once(product, modules[:MODULES], x) for _ in range(1 + REPEATS)]
    return median(times[1:])  # the first may compile a kernel


def _once(product: Product, modules: Sequence[Quantized], x: mx.array) -> float:
    mx.eval(x)
    start, after = time.perf_counter(), x
    for module in modules:
        after = x + 0 * product(after, module)[..., :1]  # begins when the one before it has ended
    mx.eval(after)
    return time.perf_counter() - start
