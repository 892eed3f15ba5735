"""Whatever is done to a batch, each of its rows stays the single cache it would have been alone.

Random programs of joins, leaves, padding, feeding, extraction and saving run on a batch and on
single caches. Every token has a number of its own, carried by its K and V, so a row in the wrong
place, a token seen too early or one lost too soon shows by name.
"""

import copy
import itertools
from dataclasses import dataclass

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from keepwarm.kv.batch import (
    LeftPadding,
    RightPadding,
    TwoSidedPadding,
    extend,
    extract,
    filter_rows,
    finalize,
    merge,
    prepare,
)
from keepwarm.kv.codec import copy_caches, encode
from keepwarm.kv.kinds import Kind, kind_of, leaves
from keepwarm.kv.quant import QuantKVCache

WINDOW = 8
PADDING = -1
WIDTH = 32
TAIL = 3  # how many tokens the first array of a state remembers

FAMILIES = {
    "kv": lambda: [KVCache()],
    "rotating": lambda: [RotatingKVCache(WINDOW)],
    "quantised": lambda: [QuantKVCache(group_size=32, bits=8)],
    "arrays": lambda: [ArraysCache(2)],
    "composite": lambda: [
        CacheList(ArraysCache(2), KVCache()),
        CacheList(RotatingKVCache(WINDOW), QuantKVCache(group_size=32, bits=4)),
    ],
}


@dataclass
class Row:
    """One sequence: its tokens so far and the single cache that was fed them."""

    tokens: list[int]
    single: list


class World:
    """A batch and the single sequences it must be equal to."""

    def __init__(self, fresh, joining, numbers=None):
        self.fresh = fresh
        self.numbers = numbers or itertools.count(1)
        self.rows = [self.sequence(slices) for slices in joining]
        self.batch = merge([row.single for row in self.rows])
        self.has_window = any(kind_of(leaf) is Kind.WINDOW for _, leaf in leaves(self.batch))

    def sequence(self, slices):
        row = Row([], self.fresh())
        for n in slices:
            self.feed_alone(row, self.new_tokens(n))
        return row

    def new_tokens(self, n):
        return [next(self.numbers) for _ in range(n)]

    def feed_alone(self, row, tokens):
        if tokens:
            seen = feed(row.single, [tokens])
            check_sight(row.single, seen, 0, row.tokens, tokens)
            row.tokens = row.tokens + tokens

    def feed_all(self, lengths, chunk=None):
        """Feed row i `lengths[i]` new tokens, right-padded, in chunks of at most `chunk`."""
        given_to = [self.new_tokens(n) for n in lengths]
        width = max(lengths)
        padded = [t + [PADDING] * (width - len(t)) for t in given_to]
        if width > 1 or min(lengths) < width:
            prepare(self.batch, RightPadding(tuple(lengths)))
        for start, stop in chunks_of(width, chunk or width):
            seen = feed(self.batch, [t[start:stop] for t in padded])
            for i, row in enumerate(self.rows):
                before = row.tokens + given_to[i][:start]
                check_sight(self.batch, seen, i, before, given_to[i][start:stop])
        finalize(self.batch)
        for row, tokens in zip(self.rows, given_to, strict=True):
            self.feed_alone(row, tokens)

    def feed_padded(self, left, lengths):
        """A first slice in which row i has `left[i]` padding before and some behind its tokens."""
        given_to = [self.new_tokens(n) for n in lengths]
        ends = tuple(a + n for a, n in zip(left, lengths, strict=True))
        prepare(self.batch, TwoSidedPadding(LeftPadding(left), RightPadding(ends)))
        padded = [
            [PADDING] * a + tokens + [PADDING] * (max(ends) - end)
            for a, tokens, end in zip(left, given_to, ends, strict=True)
        ]
        seen = feed(self.batch, padded)
        for i, (a, tokens) in enumerate(zip(left, given_to, strict=True)):
            shifted = [sights and [row[a:] for row in sights] for sights in seen]
            check_sight(self.batch, shifted, i, [], tokens)
        finalize(self.batch)
        for row, tokens in zip(self.rows, given_to, strict=True):
            self.feed_alone(row, tokens)

    def check(self):
        for path, leaf in leaves(self.batch):
            if not isinstance(leaf, ArraysCache):
                # Positions of the next tokens: what a model rotates its queries and keys by.
                assert leaf.offset.tolist() == [len(row.tokens) for row in self.rows], path
        for i, row in enumerate(self.rows):
            alone = extract(self.batch, i)
            for (path, got), (_, expected) in zip(leaves(alone), leaves(row.single), strict=True):
                where = f"row {i} of {len(self.rows)}, layer {path}"
                assert type(got) is type(expected), where
                assert held(got) == remembered(expected, row.tokens), where
                assert getattr(got, "offset", 0) == getattr(expected, "offset", 0), where
                assert_equal(encode(got), encode(expected), where)


def begun(fresh, joining):
    """The slices of sequences, none of them empty where there are states: those join no others."""
    has_state = any(kind_of(leaf) is Kind.STATE for _, leaf in leaves(fresh()))
    return [slices or [1] for slices in joining] if has_state else joining


def chunks_of(width, chunk):
    """Ends of slices, none of a single token: mlx-lm's padded window refuses those."""
    starts = [n for n in range(0, width, chunk) if n == 0 or width - n > 1]
    return list(zip(starts, [*starts[1:], width], strict=True))


def feed(caches, tokens):
    """Give every layer these tokens; answer for each layer what each row's queries could see."""
    return [
        feed_state(leaf, tokens) if isinstance(leaf, ArraysCache) else feed_kv(leaf, tokens)
        for _, leaf in leaves(caches)
    ]


def feed_kv(cache, tokens):
    n = len(tokens[0])
    mask = cache.make_mask(n, return_array=True, window_size=None)
    keys, _ = cache.update_and_fetch(*keys_and_values_of(cache, tokens))
    numbers = numbers_in(cache, keys)
    if mask is None:
        return [[row] for row in numbers]
    allowed = mx.broadcast_to(mask, (len(tokens), 1, n, len(numbers[0])))[:, 0].tolist()
    return [
        [list(itertools.compress(row, query)) for query in queries]
        for row, queries in zip(numbers, allowed, strict=True)
    ]


def keys_and_values_of(cache, tokens):
    width = WIDTH if hasattr(cache, "bits") else 2
    keys = mx.array(tokens, mx.float32)[:, None, :, None] + mx.arange(width) / (2 * width)
    return keys, -keys


def numbers_in(cache, keys):
    """The tokens that rows of K stand for, by row of the batch."""
    if hasattr(cache, "bits"):
        keys = mx.dequantize(*keys, group_size=cache.group_size, bits=cache.bits)
    return [[round(x) for x in row] for row in keys[:, 0, :, 0].tolist()]


def feed_state(cache, tokens):
    """A model in small: folds each token in, unless the mask calls it padding."""
    x = mx.array(tokens, mx.float32)
    n_rows, n = x.shape
    mask = cache.make_mask(n)
    if mask is None:
        mask = mx.ones((n_rows, n), mx.bool_)
    tail = mx.zeros((n_rows, TAIL)) if cache[0] is None else cache[0]
    total = mx.zeros((n_rows, 1)) if cache[1] is None else cache[1]
    for i in range(n):
        real, new = mask[:, i : i + 1], x[:, i : i + 1]
        tail = mx.where(real, mx.concatenate([tail[:, 1:], new], axis=1), tail)
        total = mx.where(real, total * 0.5 + new, total)
    cache[0], cache[1] = tail, total
    cache.advance(n)


def check_sight(caches, seen, i, before, tokens):
    """Row i's query at each of its new tokens saw the tokens up to it, as far as its window."""
    for (path, leaf), sights in zip(leaves(caches), seen, strict=True):
        if sights is None:
            continue
        for n, sight in enumerate(sights[i][: len(tokens)], start=1):
            expected = (before + tokens[:n])[-getattr(leaf, "max_size", 0) :]
            assert sorted(sight) == expected, f"row {i}, layer {path}, query {n}"


def remembered(single, tokens):
    if isinstance(single, ArraysCache):
        return ([0] * TAIL + tokens)[-TAIL:]
    return tokens[-getattr(single, "max_size", 0) :]


def held(cache):
    """Tokens in a single cache, oldest first, as the codec would save them."""
    tensors = encode(cache).tensors
    if isinstance(cache, ArraysCache):
        return [int(x) for x in tensors["state0"][0].tolist()] if tensors else [0] * TAIL
    if not tensors:
        return []
    keys = tensors.get("keys")
    if keys is None:
        keys = [tensors[f"keys_{part}"] for part in ("weights", "scales", "biases")]
    return numbers_in(cache, keys)[0]


def assert_equal(got, expected, where):
    """Bit for bit; a state of zeros is that of a sequence to which nothing was fed."""
    for name, array in got.tensors.items():
        other = expected.tensors.get(name, mx.zeros(array.shape, array.dtype))
        assert mx.array_equal(array, other), f"{where}: {name}"
    assert set(expected.tensors) <= set(got.tensors), where


slices = st.lists(st.sampled_from([1, 1, 1, 2, 5, 7, 8, 11]), max_size=5)
rows = st.lists(slices, min_size=1, max_size=3)
counts = st.lists(st.integers(0, 10), min_size=1, max_size=4)
steps = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, 9)),
    st.tuples(st.just("slice"), counts),
    st.tuples(st.just("chunks"), counts),
    st.tuples(st.just("filter"), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
    st.tuples(st.just("extend"), rows, st.integers(0, 9)),
    st.tuples(st.just("remerge")),
    st.tuples(st.just("save")),
)


def cycled(values, n):
    return list(itertools.islice(itertools.cycle(values), n))


def decode(world, n):
    for _ in range(n):
        world.feed_all([1] * len(world.rows))


def feed_slice(world, lengths, chunk=None):
    if world.has_window:
        lengths = [max(1, n) for n in lengths]
    lengths = cycled(lengths, len(world.rows))
    if max(lengths) > 0:
        world.feed_all(lengths, chunk)


def feed_chunks(world, lengths):
    """As BatchGenerator does: several slices between prepare and finalize, then one token.

    A row that brings nothing to a later slice loses the oldest row of a full window, which no
    later query could see; the one token puts another in its place.
    """
    feed_slice(world, lengths, chunk=4)
    decode(world, 1)


def keep(world, wanted):
    chosen = [i % len(world.rows) for i in wanted]
    filter_rows(world.batch, chosen)
    world.rows = [copy.deepcopy(world.rows[i]) for i in chosen]


def join(world, joining, n_decoded):
    other = World(world.fresh, begun(world.fresh, joining), world.numbers)
    decode(other, n_decoded)
    extend(world.batch, other.batch)
    world.rows += other.rows


def remerge(world):
    world.batch = merge([extract(world.batch, i) for i in range(len(world.rows))])


def save(world):
    world.batch = copy_caches(world.batch)


RUN = {
    "decode": decode,
    "slice": feed_slice,
    "chunks": feed_chunks,
    "filter": keep,
    "extend": join,
    "remerge": remerge,
    "save": save,
}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(joining=rows, program=st.lists(steps, max_size=7))
def test_every_row_stays_the_sequence_it_would_be_alone(family, joining, program):
    world = World(FAMILIES[family], begun(FAMILIES[family], joining))
    world.check()
    for name, *arguments in program:
        RUN[name](world, *arguments)
        world.check()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(
    amounts=st.lists(st.tuples(st.integers(0, 10), st.integers(1, 10)), min_size=1, max_size=4),
    program=st.lists(steps, max_size=4),
)
def test_an_empty_batch_may_be_padded_on_both_sides(family, amounts, program):
    """And continues like any other."""
    world = World(FAMILIES[family], [[] for _ in amounts])
    left, lengths = zip(*amounts, strict=True)
    world.feed_padded(left, lengths)
    world.check()
    for name, *arguments in program:
        RUN[name](world, *arguments)
        world.check()
