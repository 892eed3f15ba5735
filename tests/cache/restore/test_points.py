"""Where a prompt is to be restorable: messages, growing distances, places where others parted."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.cache.restore.restorer import (
    Divergence,
    PointSizes,
    divergence_point,
    restore_points,
    sparse_points,
)
from keepwarm.kv.kinds import Kind
from keepwarm.kv.layout import LayerSpec, Layout, TensorSpec, probe
from keepwarm.prefix.blocks import BLOCK_TOKENS
from tests.kit.models import LAYER_KINDS

ROW_BYTES = 1000
ROWS = LayerSpec(
    "0", Kind.DELTA, "KVCache", {}, {"keys": TensorSpec((1, 1, None, ROW_BYTES), mx.uint8)}
)


def state(n_rows: float) -> LayerSpec:
    """A state as large as so many rows."""
    spec = TensorSpec((1, int(n_rows * ROW_BYTES)), mx.uint8)
    return LayerSpec("1", Kind.STATE, "ArraysCache", {}, {"state0": spec})


def window(n_rows: int) -> LayerSpec:
    spec = TensorSpec((1, 1, None, ROW_BYTES), mx.uint8)
    return LayerSpec("1", Kind.WINDOW, "RotatingKVCache", {"max_size": n_rows}, {"keys": spec})


def hybrid(n_rows: float) -> Layout:
    return Layout((ROWS, state(n_rows)))


def test_rows_alone_need_no_points():
    assert restore_points(Layout((ROWS,)), 10_000, [100, 200], learned=150) == frozenset()


def test_distances_grow():
    """By a half, so that at most a third of what is shared is computed again."""
    points = sparse_points(PointSizes(Layout((state(1),))), 20_000)
    assert points == [256 * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)]
    assert all(3 * after <= 4 * 20_000 for after in points)


def test_the_points_that_are_left_are_far_apart():
    """Where not all may be kept, the smallest gaps are closed first."""
    assert sparse_points(PointSizes(hybrid(300)), 3_000) == [256 * n for n in (4, 8)]


@pytest.mark.parametrize("n_tokens", [400, 3_000, 50_000, 200_000])
@pytest.mark.parametrize("n_rows", [1, 300, 3_000])
def test_sparse_points_take_a_quarter_of_the_bytes_of_rows(n_tokens, n_rows):
    sizes = PointSizes(hybrid(n_rows))
    points = sparse_points(sizes, n_tokens)
    assert sum(map(sizes.point, points)) <= sizes.rows(n_tokens) / 4
    assert all(point % BLOCK_TOKENS == 0 for point in points)
    gaps = [after - before for before, after in pairwise([0, *points])]
    assert gaps == sorted(gaps) or n_rows > 1, "the nearest go first"
    if 16 * n_rows <= n_tokens:
        assert points


def test_no_sparse_point_is_near_a_message():
    sizes = PointSizes(Layout((state(1),)))
    assert 2048 in sparse_points(sizes, 5_000, [1500, 2100])
    assert 2048 not in sparse_points(sizes, 5_000, [1900])


def test_a_state_is_not_taken_where_the_store_would_delete_it():
    """Twenty short messages of a prompt whose states are large: slices end at three of them."""
    cuts = range(100, 2100, 100)
    assert restore_points(hybrid(900), 2100, cuts) == {2000, 2099}
    assert restore_points(hybrid(900), 2100, cuts, learned=710) == {710, 2000, 2099}
    assert restore_points(hybrid(10), 2100, cuts) >= {*cuts, 2099}


def test_windows_are_kept_at_every_message():
    """What they take on disk is evicted like other rows."""
    layout = Layout((ROWS, window(512)))
    assert restore_points(layout, 2100, [300, 600], learned=710) == {300, 600, 710, 2099}
    assert restore_points(layout, 50_000, [300]) > {300, 49_999}, "and some sparse ones"


WINDOWED = Layout((ROWS, window(512)))


def is_learned(layout: Layout, n_known: int, n_shared: int, n_states: int = 0) -> bool:
    return divergence_point(layout, Divergence(n_shared, n_known, n_states)) == n_shared


@pytest.mark.parametrize("layout", [WINDOWED, hybrid(900), Layout((state(900),))])
def test_a_place_is_learned_if_it_spares_enough(layout):
    assert is_learned(layout, 100, 116)
    assert divergence_point(layout, Divergence(115, 100)) == 0


def test_learned_states_have_a_budget():
    """Three are kept of any prompt. More take no more bytes than the rows up to there, or than the
    rows that they spare; windows are evicted like other rows."""
    assert is_learned(hybrid(900), 0, 50, n_states=2)
    assert not is_learned(hybrid(900), 0, 50, n_states=3)
    assert is_learned(hybrid(900), 3500, 3600, n_states=3)
    assert not is_learned(hybrid(900), 3500, 3599, n_states=3)
    assert is_learned(hybrid(900), 100, 1000, n_states=3)
    assert not is_learned(hybrid(900), 101, 1000, n_states=3)
    assert is_learned(WINDOWED, 0, 50, n_states=99)
    assert is_learned(Layout((state(900),)), 0, 50, n_states=99), "nothing to weigh them against"


@pytest.mark.parametrize(
    ("n_shared", "cuts", "place"),
    [
        (710, [100, 699, 705, 711], 705),
        (710, [694, 711], 710),
        (710, [695], 695),
        (710, [710], 710),
        (515, [510, 512], 512),
        (515, [510], 515),
        (310, [305], 310),
    ],
    ids=["nearest", "too far", "just near", "there", "end of a block", "before it", "known"],
)
def test_the_end_of_a_message_is_learned_where_prompts_part_soon_after_it(n_shared, cuts, place):
    """Questions part in their first words, each elsewhere. A fork is seen only within its block,
    and what is near to a known place is no gain."""
    assert divergence_point(hybrid(900), Divergence(n_shared, n_known=292), cuts) == place


def test_a_place_at_the_end_is_no_place_more():
    assert restore_points(hybrid(1), 100, [0, 99, 100, 200], learned=99) == {99}


@pytest.mark.parametrize("architecture", LAYER_KINDS)
def test_every_kind_of_model_has_the_points_that_it_needs(tiny_model, architecture):
    module = tiny_model(architecture)
    layout = probe(module, make_prompt_cache(module))
    points = restore_points(layout, 5000, learned=391)
    assert points >= {391, 4999} if layout.kinds - {Kind.DELTA} else not points
