"""The longest prefix that every layer can be restored at, against trying every token."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepwarm.cache.restore.plan import KnownBlocks, Needs, Point, Read, longest, n_matched
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey
from keepwarm.records.record import Part
from keepwarm.store.tier import BlockInfo, Child
from tests.store.kit import refs_of

D, W, S = Part.DELTA, Part.WINDOW, Part.STATE
REFS = refs_of(4)
KEYS = [ref.key for ref in REFS]
DELTA = Needs(delta=True, window=0, state=False)
WINDOW = Needs(delta=True, window=32, state=False)
WIDE = Needs(delta=True, window=300, state=False)
STATE = Needs(delta=True, window=0, state=True)
PURE = Needs(delta=False, window=0, state=True)
ONLY_WINDOW = Needs(delta=False, window=32, state=False)


def known(*parts: Part, n_tokens: int = BLOCK_TOKENS, w_rows: int = BLOCK_TOKENS) -> BlockInfo:
    return BlockInfo(frozenset(parts), n_tokens, w_rows if W in parts else 0, 100)


def key(n: int) -> BlockKey:
    """A block beside the prompt's own."""
    return BlockKey(bytes([n]) * 20)


def forest(held, needs, children=(), states=None, more=None):
    """A forest in which the prompt's first blocks are held as told."""
    have = dict(zip(KEYS, held, strict=False)) | (more or {})
    have = {k: v for k, v in have.items() if v is not None}
    return KnownBlocks(REFS, have, n_matched(needs, REFS, have), children, states or {})


def reads(*wanted):
    return tuple(Read(k, part, number) for k, part, number in wanted)


# By hand


BESIDE = {key(1): known(D, S, n_tokens=43)}  # a state inside the third block
ALL = [known(D, W, S)] * 4
D_ONLY, NEAR_ROWS = [known(D)] * 4, [known(D, W, w_rows=32)] * 3

# What is held of four blocks, the limit, and where every layer can be restored.
POINTS = {
    "nothing": (DELTA, forest([], DELTA), 1000, 0),
    "no state": (PURE, forest([], PURE), 1000, 0),
    "a gap": (DELTA, forest([known(D), known(D), None, known(D)], DELTA), 1023, 512),
    "the limit inside a block": (DELTA, forest(D_ONLY, DELTA), 1023, 1023),
    "all rows of the window": (WINDOW, forest([*NEAR_ROWS, known(D, W)], WINDOW), 1000, 1000),
    "just enough": (WINDOW, forest([*NEAR_ROWS, known(D, W, w_rows=56)], WINDOW), 1000, 1000),
    "one row too few": (WINDOW, forest([*NEAR_ROWS, known(D, W, w_rows=55)], WINDOW), 1000, 768),
    "no window rows": (WINDOW, forest([*NEAR_ROWS, known(D)], WINDOW), 1000, 768),
    "a state at its point only": (STATE, forest([known(D, S), known(D)], STATE), 512, 256),
    "a state beyond the limit": (STATE, forest([known(D, S)] * 2, STATE), 511, 256),
    "a block without its rows": (WINDOW, forest([known(D, W), known(W)], WINDOW), 512, 256),
    "a state after a gap": (
        STATE,
        forest([known(D, S), None, None], STATE, states={555: key(1)}, more=BESIDE),
        700,
        256,
    ),
    "the limit of rows": (DELTA, forest(ALL, DELTA), 1, 1),
    "the limit of windows": (WIDE, forest(ALL, WIDE), 255, 255),
    "the limit of states": (STATE, forest(ALL, STATE), 255, 0),
    "no room": (ONLY_WINDOW, forest(ALL, ONLY_WINDOW), 0, 0),
}


@pytest.mark.parametrize(("needs", "around", "limit", "n_tokens"), POINTS.values(), ids=POINTS)
def test_point_is_the_longest_that_every_layer_has(needs, around, limit, n_tokens):
    assert longest(needs, around, limit).n_tokens == n_tokens


def test_rows_of_a_sibling_serve_as_far_as_it_is_common():
    """628 of 628 tokens: two blocks and 116 rows of a third that goes on differently."""
    more = {key(1): known(D, n_tokens=200)}
    found = longest(DELTA, forest([known(D)] * 2, DELTA, [Child(key(1), 116)], more=more), 1000)
    assert found.n_tokens == 628
    assert found.reads[-1] == Read(key(1), D, 2)


def test_the_child_with_the_needed_rows_wins_over_the_nearer():
    """The nearest may have lost the window rows that a neighbour has."""
    more = {key(1): known(D, W, n_tokens=200, w_rows=10)}
    more[key(2)] = known(D, W, n_tokens=90, w_rows=90)
    children = [Child(key(1), 116), Child(key(2), 80)]
    found = longest(WINDOW, forest([known(D)] * 2, WINDOW, children, more=more), 1000)
    assert found.n_tokens == 512 + 80
    assert (found.reads[0], found.reads[-1]) == reads((key(2), W, 2), (key(2), D, 2))


def test_window_rows_across_blocks_are_read_first_because_they_may_be_missing():
    held = [known(D), known(D, W, w_rows=200), known(D, W)]
    found = longest(WIDE, forest(held, WIDE), 760)
    assert found.n_tokens == 760  # the rows from 460 on: block 1 holds those from 312 on
    assert [(read.part, read.number) for read in found.reads] == [
        *((W, 1), (W, 2)),
        *((D, 0), (D, 1), (D, 2)),
    ]


@pytest.mark.parametrize(
    ("n_tokens", "blocks_of"), [(1000, [2, 3]), (1024, [2, 3]), (812, [2, 3]), (811, [1, 2, 3])]
)
def test_the_blocks_of_a_window(n_tokens, blocks_of):
    assert list(WIDE.window_blocks(n_tokens)) == blocks_of
    assert list(DELTA.window_blocks(n_tokens)) == []


@pytest.mark.parametrize(
    ("needs", "part", "number", "held"),
    [(ONLY_WINDOW, W, 3, [None, None, None, known(W)]), (PURE, S, 2, [None, None, known(S)])],
)
def test_layers_without_rows_need_no_older_block(needs, part, number, held):
    found = longest(needs, forest(held, needs), 1024)
    assert found == Point((number + 1) * 256, reads((KEYS[number], part, number)), 100)


@pytest.mark.parametrize(("n_held", "source"), [(2, key(1)), (3, KEYS[2])])
def test_a_state_inside_a_block_is_read_beside_the_rows_that_are_there(n_held, source):
    """From the short block, or from the whole one where that is held too."""
    around = forest([known(D)] * n_held, STATE, states={555: key(1)}, more=BESIDE)
    found = longest(STATE, around, 700)
    assert found.n_tokens == 555
    assert (found.reads[0], found.reads[-1]) == reads((key(1), S, 2), (source, D, 2))


# Against trying every token


def rows_held(forest, source, start, first, last, part):
    """Whether a record has the rows of tokens `first … last`; it begins at token `start`."""
    held = forest.known.get(source)
    if held is None or part not in held.parts:
        return False
    first_held = held.n_tokens - held.w_rows if part is W else 0
    return start + first_held <= first and last <= start + held.n_tokens


def sources_of(needs, forest, number, n_tokens):
    """Who may serve block `number` of a prefix of `n_tokens`."""
    if number < forest.n_matched:
        return [forest.refs[number].key]
    start = number * BLOCK_TOKENS
    if number != forest.n_matched and not _first_block_of_state(needs, number, n_tokens):
        return []
    if needs.state:
        return [forest.states[n_tokens]] if n_tokens in forest.states else []
    return [c.key for c in forest.children if start + c.n_common >= n_tokens]


def _first_block_of_state(needs, number, n_tokens):
    """A model without delta rows needs no block before its window: any state may be the start."""
    return not needs.delta and needs.state and number == (n_tokens - 1) // BLOCK_TOKENS


def restorable(needs, forest, n_tokens):
    last = (n_tokens - 1) // BLOCK_TOKENS
    if needs.state and not _has_state(forest, n_tokens, last):
        return False
    beside = {s for n in range(last + 1) for s in sources_of(needs, forest, n, n_tokens)}
    own = {ref.key for ref in forest.refs[: forest.n_matched]}
    return any(
        _rows_from(needs, forest, n_tokens, last, choice) for choice in (beside - own) | {None}
    )


def _has_state(forest, n_tokens, last):
    stands = [forest.states[n_tokens]] if n_tokens in forest.states else []
    if n_tokens % BLOCK_TOKENS == 0 and last < forest.n_matched:
        stands.append(forest.refs[last].key)
    return any(S in forest.known[k].parts for k in stands if k in forest.known)


def _rows_from(needs, forest, n_tokens, last, choice):
    """Whether all rows are there if `choice` serves what lies past the match."""
    for number in range(last + 1):
        start, end = number * BLOCK_TOKENS, min(n_tokens, (number + 1) * BLOCK_TOKENS)
        source = forest.refs[number].key if number < forest.n_matched else choice
        if number >= forest.n_matched and choice not in sources_of(needs, forest, number, n_tokens):
            source = None
        if needs.delta and not rows_held(forest, source, start, start, end, D):
            return False
        first = max(start, n_tokens - needs.window)
        if needs.window and first < end and not rows_held(forest, source, start, first, end, W):
            return False
    return True


@st.composite
def blocks(draw, n_tokens):
    parts = draw(st.frozensets(st.sampled_from(Part), min_size=1))
    w_rows = draw(st.sampled_from([8, 31, 32, 33, 100, 255, 256])) if W in parts else 0
    return BlockInfo(parts, n_tokens, min(w_rows, n_tokens), draw(st.integers(1, 50)))


@st.composite
def cases(draw):
    kinds = st.tuples(st.booleans(), st.sampled_from([0, 8, 32, 256, 300, 600]), st.booleans())
    needs = Needs(*draw(kinds.filter(any)))
    have = {k: draw(blocks(BLOCK_TOKENS)) for k in draw(st.sets(st.sampled_from(KEYS)))}
    matched = n_matched(needs, REFS, have)
    children, states = [], {}
    for n, length in enumerate(draw(st.lists(st.integers(1, 256), max_size=3, unique=True))):
        beside = draw(blocks(length))
        have[key(n + 1)] = beside
        if needs.state:
            number = draw(st.integers(0, len(REFS)))
            states[number * BLOCK_TOKENS + length] = key(n + 1)
        else:
            children.append(Child(key(n + 1), draw(st.integers(1, length))))
    children.sort(key=lambda child: -child.n_common)
    limit = draw(st.integers(1, 1300) | st.sampled_from([255, 256, 257, 512, 1023, 1024]))
    return needs, KnownBlocks(REFS, have, matched, children, states), limit


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_point_is_the_longest_and_every_read_is_needed(case):
    needs, around, limit = case
    point = longest(needs, around, limit)
    furthest = max((n for n in range(1, limit + 1) if restorable(needs, around, n)), default=0)
    assert point.n_tokens == furthest
    assert_needed(needs, point)
    sizes = {read.key: around.known[read.key].n_bytes for read in point.reads}
    assert point.n_bytes == sum(sizes.values())


def assert_needed(needs, point):
    """One record for each block and part that a layer asks for, no more; windows and states come
    first, then rows, each in the order of blocks.
    """
    assert len(set(point.reads)) == len(point.reads)
    last = (point.n_tokens - 1) // BLOCK_TOKENS
    wanted = set()
    for number in range(last + 1 if point.n_tokens else 0):
        if needs.delta:
            wanted.add((D, number))
        if needs.window and (number + 1) * BLOCK_TOKENS > point.n_tokens - needs.window:
            wanted.add((W, number))
    if needs.state and point.n_tokens:
        wanted.add((S, last))
    assert {(read.part, read.number) for read in point.reads} == wanted
    assert len(point.reads) == len(wanted)
    order = [(read.part is D, read.part is S, read.number) for read in point.reads]
    assert order == sorted(order)


@given(st.lists(st.booleans(), min_size=4, max_size=4))
@example([True, False, True, False])
def test_matching_stops_at_a_gap_where_all_rows_are_needed(there):
    have = {k: known(D, S) for k, is_there in zip(KEYS, there, strict=True) if is_there}
    leading = next((n for n, is_there in enumerate(there) if not is_there), 4)
    last = max((n + 1 for n, is_there in enumerate(there) if is_there), default=0)
    assert n_matched(DELTA, REFS, have) == leading
    assert n_matched(PURE, REFS, have) == last


def test_a_block_that_lost_its_rows_is_not_built_on():
    """Its window rows or its state may have outlived them."""
    have = {key: known(D, S) for key in KEYS}
    have[KEYS[1]] = known(S)
    assert n_matched(DELTA, REFS, have) == 1
    assert n_matched(PURE, REFS, have) == 4
