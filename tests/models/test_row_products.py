"""Quantised products in other ways: the same results, and only what is faster is used."""

import json
import math
import time
from contextlib import closing
from itertools import pairwise

import mlx.core as mx
import pytest
from benchmarks.shapes import build
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from keepwarm import blas
from keepwarm.models import row_products
from keepwarm.models.load import load
from keepwarm.models.row_products import (
    ROW_COUNTS,
    AlikeKernel,
    ApartEmbedding,
    ApartLinear,
    ExpertKernel,
    ProductByRows,
    Products,
    ProductsFile,
    ProductTrials,
    RowEmbedding,
    RowLinear,
    RowSwitch,
    TensorKernel,
    by_shape,
    faster_way,
    flat,
    plain,
)
from keepwarm.state_file import MACHINE
from tests.kit.checkpoints import write_checkpoint

linux_cpu = pytest.mark.linux_cpu

ROWS = (1, 2, 3, 7)
FLAT = {2: "flat"}


class FakeKernel:
    """Has a name and counts its calls."""

    def __init__(self, name, row_counts=range(2, 33), result=plain, is_exact=False, ndim=2):
        self.name, self._ndim = name, ndim
        self.row_counts = row_counts
        self.is_exact = is_exact
        self.calls = []
        self._result = result

    def can_multiply(self, module):
        return module.bits == 4 and module["weight"].ndim == self._ndim

    def __call__(self, x, module, *experts):
        self.calls.append(x.shape)
        return self._result(x, module, *experts)


@pytest.fixture
def model(tmp_path):
    return build("tiny", tmp_path).module


@pytest.fixture
def seconds(monkeypatch):
    """What each way is measured to take, by name and rows; what is not set takes a second."""
    times = {}

    def measured(product, modules, n_rows):
        name = getattr(product, "name", getattr(product, "__name__", ""))
        return times.get((name, n_rows), times.get(name, 1.0))

    monkeypatch.setattr(row_products, "seconds", measured)
    return times


def linear(bias=False, dtype=mx.float32):
    made = nn.QuantizedLinear(128, 48, bias=bias)
    made.set_dtype(dtype)
    if bias:
        made.bias = mx.arange(48).astype(dtype)
    return made


def rows_of(n_rows, dtype=mx.float32):
    return mx.random.normal((n_rows, 1, 128), key=mx.random.key(n_rows)).astype(dtype)


@pytest.mark.parametrize("n_rows", ROWS)
def test_another_layout_has_the_same_result(n_rows):
    module, x = linear(), rows_of(n_rows)
    assert mx.array_equal(flat(x, module), plain(x, module))
    assert mx.array_equal(flat(x.reshape(1, n_rows, 128), module)[0], plain(x, module)[:, 0])


@pytest.mark.parametrize("bias", [False, True])
def test_a_replaced_linear_is_the_same_but_for_the_layout(bias):
    module = linear(bias)
    products = ProductByRows(mx.float32, Products().named, FLAT)
    replaced = RowLinear(module, products)
    assert isinstance(replaced, nn.QuantizedLinear)
    assert [*replaced.parameters()] == [*module.parameters()]
    assert all(replaced[name] is array for name, array in module.parameters().items())
    assert replaced.trainable_parameters() == module.trainable_parameters()
    for n_rows in ROWS:
        assert mx.array_equal(replaced(rows_of(n_rows)), module(rows_of(n_rows)))


def test_a_replaced_embedding_looks_up_and_multiplies_the_same():
    module = nn.QuantizedEmbedding(48, 128)
    replaced = RowEmbedding(module, ProductByRows(mx.float32, Products().named, FLAT))
    tokens = mx.array([[3], [7]])
    assert mx.array_equal(replaced(tokens), module(tokens))
    assert mx.array_equal(replaced.as_linear(rows_of(5)), module.as_linear(rows_of(5)))


@pytest.mark.parametrize(
    ("n_rows", "used"), [(2, ["a"]), (5, ["a"]), (7, ["a"]), (8, ["b"]), (99, ["b"])]
)
def test_a_way_is_used_from_its_number_of_rows_on(n_rows, used):
    ways = {name: FakeKernel(name) for name in "ab"}
    ProductByRows(mx.float32, ways, {2: "a", 8: "b"})(rows_of(n_rows), linear())
    assert [name for name, way in ways.items() if way.calls] == used


def test_one_row_is_always_multiplied_as_mlx_does():
    """A kernel costs the host more for each call, and one row has no time for that."""
    way = FakeKernel("a")
    x, module = rows_of(1), linear()
    product = ProductByRows(mx.float32, {"a": way}, {1: "a"})
    assert mx.array_equal(product(x, module), plain(x, module))
    assert not way.calls


def test_rows_of_another_dtype_are_multiplied_as_before():
    """A kernel reads all numbers as of one type."""
    way = FakeKernel("a")
    products = ProductByRows(mx.bfloat16, {"a": way}, {2: "a"})
    x, module = rows_of(2), linear(dtype=mx.bfloat16)
    assert mx.array_equal(products(x, module), plain(x, module))
    assert not way.calls


def choose(model, products, kept):
    """As an engine that is idle for long does."""
    trials = ProductTrials(model, products, kept)
    list(trials.run())
    assert not trials.n_left
    trials.save()


def run_until(trials, n_left):
    """As one that becomes busy does."""
    with closing(trials.run()) as steps:
        while trials.n_left > n_left:
            next(steps)


def ways_used(model):
    """Kinds of the modules that multiply."""
    return {type(module) for module in model.modules() if hasattr(module, "bits")}


def test_until_it_is_measured_everything_is_multiplied_as_mlx_does(model, seconds, tmp_path):
    seconds["kernel"] = 0.5
    kernel = FakeKernel("kernel", range(3, 9))
    trials = ProductTrials(model, Products([kernel]), ProductsFile(tmp_path))
    assert ways_used(model) == {nn.QuantizedLinear, nn.QuantizedEmbedding}
    n_shapes = len(by_shape(model))
    assert trials.n_left == trials.n_all == n_shapes * len(ROW_COUNTS)
    run_until(trials, trials.n_all - n_shapes)
    kernel.calls.clear()
    model(mx.array([[5]] * 4))
    assert kernel.calls, "the fewest rows come first, for all shapes"
    kernel.calls.clear()
    model(mx.array([[5]] * 5))
    assert not kernel.calls, "this many were not measured yet"


def test_the_next_start_goes_on_where_this_one_ended(model, seconds, tmp_path):
    seconds["kernel"] = 0.5
    kept, kernel = ProductsFile(tmp_path), FakeKernel("kernel", range(3, 9))
    compiled = []
    first = ProductTrials(model, Products([kernel]), kept, lambda: compiled.append(1))
    run_until(first, 2)
    assert not (tmp_path / MACHINE).exists(), "the engine's thread writes no file"
    assert not first.is_measured
    first.save()
    assert compiled == [1]
    again = build("tiny", tmp_path).module
    second = ProductTrials(again, Products([kernel]), ProductsFile(tmp_path))
    kernel.calls.clear()
    run_until(second, 2)
    assert {n_rows for n_rows, *_ in kernel.calls} == {3, 5, 8}, "before a request needs them"
    kernel.calls.clear()
    again(mx.array([[5]] * 4))
    assert kernel.calls, "what is known is used at once"
    assert not second.is_measured
    list(second.run())
    second.save()
    third = ProductTrials(build("tiny", tmp_path).module, Products([kernel]), kept)
    assert third.n_left == third.n_all
    assert third.is_measured, "it is only left to be compiled"


def test_a_faster_way_is_used_and_kept(model, seconds, tmp_path):
    kernel = FakeKernel("kernel", range(2, 9))
    seconds |= {"flat": 0.5, "kernel": 0.4, ("kernel", 3): 0.97}
    tokens = mx.array([[5], [6], [7], [8], [9]])
    before, names = model(tokens), [name for name, _ in tree_flatten(model.parameters())]
    kept = ProductsFile(tmp_path)
    choose(model, Products([kernel]), kept)
    expected = {
        3: "plain",
        5: "kernel",
        8: "kernel",
        9: "flat",
        17: "flat",
        33: "flat",
    }
    assert all(found == expected for found in kept.read().values())
    assert set(kept.read()) == set(by_shape(build("tiny", tmp_path).module))
    assert not by_shape(model), "all are replaced"
    kernel.calls.clear()
    assert mx.array_equal(model(tokens), before)
    assert kernel.calls
    assert [name for name, _ in tree_flatten(model.parameters())] == names


def ways_of(products, module):
    return [faster_way(products, [module], n_rows) for n_rows in ROW_COUNTS]


def both_kernels(**options):
    return Products(
        [
            FakeKernel(kernel.name, kernel.row_counts, **options)
            for kernel in (AlikeKernel, TensorKernel)
        ]
    )


def test_the_way_depends_on_the_number_of_rows(seconds):
    seconds["plain"] = 2.0
    alike, tensor = AlikeKernel.name, TensorKernel.name
    expected = [alike, alike, tensor, tensor, tensor, "flat"]
    assert ways_of(both_kernels(), linear()) == expected


def test_a_kernel_is_preferred_to_one_matrix_if_both_are_faster(seconds):
    """Its results do not depend on the number of rows."""
    seconds |= {"plain": 2.0, "flat": 0.9}
    assert ways_of(both_kernels(), linear())[3] == TensorKernel.name
    seconds[TensorKernel.name] = 1.95
    assert ways_of(both_kernels(), linear())[3] == "flat"


def test_weights_that_no_kernel_fits_are_one_matrix_from_eight_rows_on(seconds):
    seconds["plain"] = 2.0
    made = nn.QuantizedLinear(128, 48, bias=False, bits=8)
    assert ways_of(both_kernels(), made) == ["plain"] * 2 + ["flat"] * 4


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_kernel_that_has_to_be_exact_may_not_even_round_otherwise(seconds, is_exact):
    seconds["plain"] = 2.0
    rounded = FakeKernel("kernel", result=lambda x, m: plain(x, m) * 1.0001, is_exact=is_exact)
    used = ways_of(Products([rounded]), linear())
    assert ("kernel" in used) == (not is_exact)
    same = FakeKernel("kernel", is_exact=is_exact)
    assert "kernel" in ways_of(Products([same]), linear())


def test_time_that_only_the_host_spends_counts():
    def slow(x, module):
        time.sleep(0.002)
        return x[..., :48]  # nearly nothing for the device

    modules = [linear() for _ in range(4)]
    assert row_products.seconds(slow, modules, 2) >= 4 * 0.002


def test_products_are_measured_as_steps_are_run(monkeypatch):
    """The next round is begun before this one is waited for."""
    events = []
    begin, wait = mx.async_eval, mx.eval
    monkeypatch.setattr(mx, "async_eval", lambda x: (events.append(("begun", x)), begin(x)))
    monkeypatch.setattr(mx, "eval", lambda x: (events.append(("waited", x)), wait(x)))
    row_products.seconds(plain, [linear()], 2)
    begun = [i for i, (kind, _) in enumerate(events) if kind == "begun"]
    assert len(begun) == 1 + row_products.ROUNDS
    for first, second in pairwise(begun):
        (kind, waited), (_, next_begun) = events[second + 1], events[second]
        assert kind == "waited"
        assert waited is events[first][1]
        assert waited is not next_begun


def test_what_is_known_is_not_measured_again(model, seconds, tmp_path, monkeypatch):
    seconds["flat"] = 0.5
    choose(build("tiny", tmp_path).module, Products(), ProductsFile(tmp_path))
    monkeypatch.setattr(row_products, "seconds", None)
    choose(model, Products(), ProductsFile(tmp_path))
    assert isinstance(model.model.layers[0].mlp.up_proj, RowLinear)


def test_what_another_process_has_measured_stays(tmp_path):
    for n_rows in (3, 5):
        ProductsFile(tmp_path).add({"shape": {n_rows: "flat"}, f"of {n_rows}": {}})
    kept = {"shape": {3: "flat", 5: "flat"}, "of 3": {}, "of 5": {}}
    assert ProductsFile(tmp_path).read() == kept


@pytest.mark.parametrize("damage", ["version", "a way that is gone", "no number"])
def test_what_was_measured_with_something_else_is_measured_again(model, seconds, tmp_path, damage):
    seconds["flat"] = 0.5
    choose(build("tiny", tmp_path).module, Products(), ProductsFile(tmp_path))
    file = tmp_path / MACHINE
    text = file.read_text()
    if damage == "version":
        whole = json.loads(text)
        whole["products"]["depends"][1] = "0.1"
        file.write_text(json.dumps(whole))
    elif damage == "no number":
        file.write_text(text.replace('"33"', '"x"'))
    else:
        file.write_text(text.replace("flat", "gone"))
    choose(model, Products(), ProductsFile(tmp_path))
    assert all(names[33] == "flat" for names in ProductsFile(tmp_path).read().values())
    assert isinstance(model.model.layers[0].mlp.up_proj, RowLinear)


def test_where_nothing_is_faster_no_module_is_replaced(model, seconds, tmp_path):
    seconds["flat"] = 0.97
    before = [type(module) for module in model.modules()]
    choose(model, Products(), ProductsFile(tmp_path))
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("fault", ["wrong", "nan", "does not compile"])
def test_a_kernel_that_is_wrong_here_is_not_used(model, seconds, tmp_path, fault):
    def faulty(x, module):
        if fault == "does not compile":
            raise RuntimeError("Failed to compile kernel")
        return plain(x, module)[..., ::-1] * (mx.nan if fault == "nan" else 1)

    seconds["kernel"] = 0.1
    kept = ProductsFile(tmp_path)
    choose(model, Products([FakeKernel("kernel", result=faulty)]), kept)
    assert all(set(names.values()) == {"plain"} for names in kept.read().values())


def test_what_is_measured_is_a_way_to_multiply(model):
    modules = [*next(iter(by_shape(model).values())).values()]
    assert faster_way(Products(), modules, 8) in {"plain", "flat"}


def load_measured(tmp_path, monkeypatch, rows_apart):
    """A model on a machine whose BLAS was measured."""
    monkeypatch.setattr(blas, "rows_apart", lambda home: rows_apart)
    return load(str(write_checkpoint(tmp_path / "model"))).module


@linux_cpu
def test_on_a_cpu_few_rows_are_multiplied_as_each_alone(tmp_path, monkeypatch):
    model = load_measured(tmp_path, monkeypatch, 3)
    kinds = [type(module) for module in model.modules()]
    assert ApartLinear in kinds
    assert not {nn.Linear, nn.Embedding} & {*kinds}
    tokens = mx.array([[5], [6], [7]])
    alone = mx.concatenate([model(tokens[i : i + 1]) for i in range(3)])
    assert mx.array_equal(model(tokens), alone)


@linux_cpu
def test_where_one_matrix_is_as_fast_a_model_is_as_it_was(tmp_path, monkeypatch):
    model = load_measured(tmp_path, monkeypatch, 1)
    assert not any(isinstance(m, ApartLinear | ApartEmbedding) for m in model.modules())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (1, 1)])
def test_rows_of_a_batch_or_a_draft_are_each_row_alone(shape, bias):
    module = nn.Linear(128, 48, bias=bias)
    replaced, x = ApartLinear(module, 3), rows_of(3)[: math.prod(shape)]
    assert all(replaced[name] is array for name, array in module.parameters().items())
    alone = mx.concatenate([module(row) for row in x])
    assert mx.array_equal(replaced(x.reshape(*shape, 128)), alone.reshape(*shape, 48))


def test_more_rows_are_one_matrix():
    module, x = nn.Linear(128, 48), rows_of(4)
    assert mx.array_equal(ApartLinear(module, 3)(x), module(x))


def test_rows_apart_of_an_embedding_are_its_head():
    module = nn.Embedding(48, 128)
    replaced, x = ApartEmbedding(module, 3), rows_of(3)
    assert mx.array_equal(replaced(mx.array([3, 7])), module(mx.array([3, 7])))
    alone = mx.concatenate([module.as_linear(x[i : i + 1]) for i in range(3)])
    assert mx.array_equal(replaced.as_linear(x), alone)


@pytest.mark.parametrize("kernel", [TensorKernel, AlikeKernel])
def test_a_kernel_refuses_what_it_cannot_multiply(kernel):
    def can(dtype=mx.bfloat16, **options):
        module = nn.QuantizedLinear(128, 48, bias=False, **options)
        if options.get("mode", "affine") == "affine":
            module.set_dtype(dtype)
        return kernel.can_multiply(module)

    assert all(can(group_size=size) for size in (32, 64, 128))
    assert not any(can(bits=bits) for bits in (3, 6))
    assert not can(mode="mxfp4", group_size=32)
    assert not can(dtype=mx.float32)
    assert can(bits=8) == (kernel is TensorKernel)


@pytest.mark.parametrize(("n_rows", "tiles"), [(1, 1), (8, 1), (9, 2), (17, 4), (32, 4)])
def test_a_block_has_a_tile_for_every_eight_rows(n_rows, tiles):
    module = linear(dtype=mx.bfloat16)
    arguments = TensorKernel.arguments(rows_of(n_rows, mx.bfloat16), module)
    assert dict(arguments["template"])["TILES"] == tiles
    assert arguments["grid"] == (3 * 256, 1, 1)
    assert arguments["output_shapes"] == [(n_rows, 1, 48)]


@pytest.mark.parametrize(("n_rows", "sums"), [(3, 4), (4, 4), (5, 7), (7, 7)])
def test_a_thread_has_sums_for_all_rows(n_rows, sums):
    arguments = AlikeKernel.arguments(rows_of(n_rows, mx.bfloat16), linear(dtype=mx.bfloat16))
    assert dict(arguments["template"])["ROWS"] == sums
    assert arguments["grid"] == (6 * 256, 1, 1)
    assert arguments["output_shapes"] == [(n_rows, 1, 48)]


def test_every_kernel_that_is_compiled_is_measured_at_its_fewest_rows():
    module, firsts, last = linear(dtype=mx.bfloat16), [], None
    for kernel in (AlikeKernel, TensorKernel):
        for n_rows in kernel.row_counts:
            template = kernel.arguments(rows_of(n_rows, mx.bfloat16), module)["template"]
            if template != last:
                firsts.append(n_rows)
            last = template
    assert (*firsts, TensorKernel.row_counts.stop) == ROW_COUNTS


def test_the_kernel_for_experts_has_blocks_for_each_pair():
    switch = QuantizedSwitchLinear(128, 48, 4, bias=False)
    x = mx.zeros((2, 1, 1, 1, 128))
    experts = mx.zeros((2, 1, 3), mx.uint32)
    arguments = ExpertKernel.arguments(x, switch, experts)
    assert arguments["grid"] == (3 * 256, 6, 1)
    assert arguments["output_shapes"] == [switch(x, experts).shape]


def expert_kernel():
    return FakeKernel(ExpertKernel.name, ExpertKernel.row_counts, ndim=3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_pairs", "is_used"), [(127, False), (128, True), (512, True)])
def test_so_many_pairs_of_rows_and_experts_are_multiplied_by_the_kernel(n_pairs, is_used, bias):
    module = QuantizedSwitchLinear(128, 48, 4, bias=bias)
    if bias:
        module.bias = mx.arange(4 * 48).reshape(4, 48).astype(mx.float32)
    kernel = expert_kernel()
    named = {"plain": plain, kernel.name: kernel}
    replaced = RowSwitch(module, ProductByRows(mx.float32, named, {128: kernel.name, 513: "plain"}))
    assert isinstance(replaced, QuantizedSwitchLinear)
    x, experts = rows_of(n_pairs), mx.sort(mx.arange(n_pairs) % 4)
    expected = module(x, experts, sorted_indices=True)
    assert mx.allclose(replaced(x, experts, sorted_indices=True), expected, atol=1e-5)
    assert bool(kernel.calls) == is_used
    kernel.calls.clear()
    more, all_experts = rows_of(513), mx.sort(mx.arange(513) % 4)
    assert mx.array_equal(replaced(more, all_experts), module(more, all_experts))
    assert not kernel.calls, "as many as a prompt has"


def test_experts_are_measured_by_pairs_and_no_other_way_is_tried(seconds, tmp_path):
    seconds |= {"plain": 2.0, ("keepwarm_experts", 128): 1.95}
    kernel, of_rows = expert_kernel(), FakeKernel("rows", range(2, 600))
    model, kept = build("tiny-experts", tmp_path).module, ProductsFile(tmp_path)
    choose(model, Products([of_rows, kernel]), kept)
    switches = [m for m in model.modules() if isinstance(m, QuantizedSwitchLinear)]
    assert {type(module) for module in switches} == {RowSwitch}
    of_experts = [names for shape, names in kept.read().items() if " of 8," in shape]
    assert len(of_experts) == len({row_products._shape(module) for module in switches}) > 0
    expected = {128: "plain", 256: kernel.name, 513: "plain"}
    assert all(names == expected for names in of_experts)
    kernel.calls.clear()
    model(mx.array([[5]] * 127))
    assert not kernel.calls
    model(mx.array([[5]] * 128))
    assert {shape[0] for shape in kernel.calls} == {256}, "two experts for each row"
