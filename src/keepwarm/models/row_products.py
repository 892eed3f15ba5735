"""How rows are multiplied by quantised weights on CUDA, by what is faster on this device.

mlx-lm's models give MLX a batch of n sequences as n matrices of one row, and on CUDA that costs n
times one row. Which way is better depends on the number of rows:

- One row or two: always MLX's own way. A kernel of ours costs the host more for each call than one
  of MLX, and such a step is over before the host has enqueued the next.
- 3 to 7 rows: a kernel that computes each row bit for bit as MLX computes one, and reads the
  weights once for all. It is used only if its results here are equal to MLX's.
- 8 to 32 rows: a kernel on tensor cores. From eight rows on MLX's results are not those of one row
  anyway; those of this kernel are as exact, and do not depend on the number of rows.
- More rows, and from eight on where no kernel fits the weights: MLX's own product of one matrix.

Each is used only if it was measured to be faster than MLX's own way when the model was loaded,
for the modules of each shape, and with what it costs the host: products are measured as decode
steps are run, the next begun while the device computes. What was measured is kept between starts.
"""

from __future__ import annotations

import logging
import time
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
from keepwarm.models.product_kernels import AlikeKernel, Quantized, RowKernel, TensorKernel
from keepwarm.state_file import MACHINE, StateFile

LOG = logging.getLogger(__name__)
TRIAL = 3  # raise it if kernels or the measurement change
# From each of these on, up to the next, one kernel is used. It gains least at the fewest rows.
ROW_COUNTS = (3, 5, 8, 9, 17, 33)
MATRIX_ROWS = 8  # from here on MLX multiplies a matrix on CUDA, below it one row after the other
MARGIN = 0.95  # of the time of `plain`: another way has to be faster than this
ROUNDS = 6
MODULES = 8  # more weights than the cache of a GPU holds, as in a model
MAX_APART = 0.1  # of the mean size of results; rounding makes a tenth of it, another order 1.4

Product: TypeAlias = Callable[[mx.array, Quantized], mx.array]
Names: TypeAlias = dict[int, str]  # of products, each from a number of rows on


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


class Products:
    """The ways to multiply that this device has."""

    def __init__(self, row_kernels: Sequence[RowKernel] = ()) -> None:
        self._kernels = {kernel.name: kernel for kernel in row_kernels}
        self.named: dict[str, Product] = {"plain": plain, "flat": flat, **self._kernels}

    def for_rows(self, n_rows: int, module: Quantized) -> list[str]:
        """What may be used instead of `plain`, the better one first."""
        found = [
            name
            for name, kernel in self._kernels.items()
            if n_rows in kernel.row_counts and kernel.can_multiply(module)
        ]
        return [*found, "flat"] if n_rows >= MATRIX_ROWS else found

    def is_right(self, name: str, module: Quantized, n_rows: int) -> bool:
        """Whether it runs here and its result is MLX's: all bits, or all but rounding."""
        x = mx.random.normal((n_rows, 1, _n_inputs(module)), key=mx.random.key(n_rows))
        x = x.astype(module["scales"].dtype)
        expected = plain(x, module)
        try:
            result = self.named[name](x, module)
            mx.eval(result)
        except RuntimeError as error:  # a kernel that does not compile
            LOG.warning("a way to multiply by quantised weights is not used: %s", error)
            return False
        if name in self._kernels and self._kernels[name].is_exact:
            return bool(mx.array_equal(result, expected))
        return apart(result, expected) < MAX_APART


class ProductByRows:
    """The way for every number of rows."""

    def __init__(self, dtype: mx.Dtype, named: Mapping[str, Product], names: Names) -> None:
        self._dtype = dtype
        self._products: list[Product] = [plain]
        for n_rows in range(1, max(names) + 1):
            self._products.append(named[names[n_rows]] if n_rows in names else self._products[-1])

    def __call__(self, x: mx.array, module: Quantized) -> mx.array:
        n_rows = x.size // x.shape[-1]
        if n_rows == 1 or x.dtype != self._dtype:
            return plain(x, module)
        return self._products[min(n_rows, len(self._products) - 1)](x, module)


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
    """What was faster on this machine, kept in the home directory."""

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
    """Have the model's quantised products computed in the ways that are faster here.

    Does nothing but on CUDA: Metal joins rows by itself, and on CPUs weights are not quantised.
    """
    if kernels.are_compiled():
        choose(model, Products([AlikeKernel(), TensorKernel()]), ProductsFile(home))


def choose(model: Module, products: Products, kept: ProductsFile) -> None:
    """Measure what is not known yet, and replace the modules that can be faster."""
    known, shapes = kept.read(), by_shape(model)
    new = {
        shape: faster_ways(products, [*modules.values()])
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


def faster_ways(products: Products, modules: Sequence[Quantized]) -> Names:
    """The way for each number of rows, by modules of one shape."""
    return {n_rows: _faster_way(products, modules, n_rows) for n_rows in ROW_COUNTS}


def _faster_way(products: Products, modules: Sequence[Quantized], n_rows: int) -> str:
    names = products.for_rows(n_rows, modules[0])
    usable = [name for name in names if products.is_right(name, modules[0], n_rows)]
    if not usable:
        return "plain"
    enough = MARGIN * seconds(plain, modules, n_rows)
    for name in usable:
        if seconds(products.named[name], modules, n_rows) < enough:
            return name
    return "plain"


def apart(result: mx.array, expected: mx.array) -> float:
    """The mean difference, of the mean size; not a number if a result is not."""
    result, expected = result.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.abs(result - expected).mean() / mx.abs(expected).mean())


def _n_inputs(module: Quantized) -> int:
    return int(module["scales"].shape[-1] * module.group_size)


def seconds(product: Product, modules: Sequence[Quantized], n_rows: int) -> float:
    """Of one product by each module, where rounds of them follow each other as decode steps do.

    The next round is built and begun before this one is waited for, so that it takes what the
    device needs or what the host needs, whichever is more.
    """
    x = mx.ones((n_rows, 1, _n_inputs(modules[0])), modules[0]["scales"].dtype)
    before = _round(product, modules[:MODULES], x)
    mx.eval(before)  # compiles a kernel
    times = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        after = _round(product, modules[:MODULES], before)
        mx.async_eval(after)
        mx.eval(before)
        times.append(time.perf_counter() - start)
        before = after
    mx.eval(before)
    return median(times[1:])  # in the first, nothing is waited for


def _round(product: Product, modules: Sequence[Quantized], x: mx.array) -> mx.array:
    """One product after the other; the few operations between them are as many as in a model."""
    for module in modules:
        x = x + 0 * product(x, module)[..., :1]
    return x
