"""Rows that end where they end: whatever is fed, taken back, joined or left, each row stays the
single sequence that it would have been alone.
"""

import mlx.core as mx
import numpy as np
import pytest

from keepwarm import kv
from keepwarm.errors import BadInput, CacheMismatch, UnsupportedCache
from keepwarm.kv.rows import STEP
from tests.kit.models import WINDOW, tiny

N_VOCAB = 128
FAMILIES = {
    "llama": {},  # one row of K and V per token
    "gemma3_text": {},  # windows and whole layers
    "deepseek_v3": {},  # K and V of different widths
    "quantised": {"bits": 8, "group_size": 32},
}
# Where a sum's last bit differs, a key between two levels of 8 bits is rounded to the other one.
ROUNDED_APART = 1e-3


def model_of(family):
    return tiny("llama" if family == "quantised" else family)


def empty(family, model):
    caches = kv.make_caches(model)
    return kv.quantize_caches(caches, **FAMILIES[family]) if FAMILIES[family] else caches


def fed(family, model, tokens):
    caches = empty(family, model)
    if tokens:
        mx.eval(model(mx.array([tokens]), cache=caches))
    return caches


def rounded_alike(caches, row, alone, n_tokens):
    """Whether the 8-bit numbers of a row are those of the single sequence."""
    return all(
        mx.array_equal(ours[0][row, :, :n_tokens], theirs[0][0, :, :n_tokens]).item()
        for cache, single in zip(caches, alone, strict=True)
        for ours, theirs in ((cache.keys, single.keys), (cache.values, single.values))
    )


class Rows:
    """A batch, and the tokens that each of its rows has accepted."""

    def __init__(self, family, lengths, seed):
        self.family, self.model = family, model_of(family)
        self.random = np.random.default_rng(seed)
        self.tokens = [self.some(n) for n in lengths]
        self.batch = kv.merge([fed(family, self.model, t) for t in self.tokens], own_ends=True)

    def some(self, n):
        return self.random.integers(0, N_VOCAB, n).tolist()

    def step(self):
        """Feed each row a right beginning and a wrong rest, and take the rest back."""
        n = int(self.random.integers(1, 9))
        n_right = [int(self.random.integers(1, n + 1)) for _ in self.tokens]
        drafts = [self.some(n) for _ in self.tokens]
        logits = self.model(mx.array(drafts), cache=self.batch)
        for row, right in enumerate(n_right):
            self.tokens[row] += drafts[row][:right]
            self.compare(row, logits[row, :right])
        kv.trim(self.batch, [n - right for right in n_right])

    def compare(self, row, logits, extracted=None):
        caches, tokens = empty(self.family, self.model), self.tokens[row]
        alone = self.model(mx.array([tokens]), cache=caches)[0, -logits.shape[0] :]
        ours = self.batch if extracted is None else extracted
        place = row if extracted is None else 0
        is_alike = self.family != "quantised" or rounded_alike(ours, place, caches, len(tokens))
        assert mx.abs(alone - logits).max().item() < (1e-4 if is_alike else ROUNDED_APART)

    def check_extracted(self):
        for row, tokens in enumerate(self.tokens):
            single = kv.extract(self.batch, row)
            assert kv.token_count(single) == len(tokens)
            next_token = self.some(1)
            logits = self.model(mx.array([next_token]), cache=single)
            self.tokens[row] = [*tokens, *next_token]
            self.compare(row, logits[0], extracted=single)
            self.tokens[row] = tokens

    def join(self, n):
        self.tokens.append(self.some(n))
        joining = fed(self.family, self.model, self.tokens[-1])
        kv.extend(self.batch, kv.merge([joining], own_ends=True))

    def keep(self, rows):
        kv.filter_rows(self.batch, rows)
        self.tokens = [self.tokens[row] for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_take_back_other_numbers_stay_as_if_alone(family):
    rows = Rows(family, [40, 7, 3 * WINDOW], seed=5)
    for _ in range(6):
        rows.step()
    rows.join(21)
    rows.step()
    rows.keep([3, 0])
    rows.step()
    rows.check_extracted()


def test_a_window_of_one_row_is_no_slice_that_begins_later():
    """MLX's attention of one token on CUDA would read the buffer from its first slot."""
    rows = Rows("gemma3_text", [WINDOW + 5], 1)
    window = next(cache for cache in rows.batch if cache.window)
    new = mx.ones((1, window.keys.shape[1], 1, window.keys.shape[3]))
    seen, _ = window.update_and_fetch(new, new)
    last = window.keys[:, :, window.ends[0] - WINDOW : window.ends[0]]
    assert np.array_equal(seen, last)
    assert np.asarray(seen).flags.c_contiguous
    assert not np.asarray(last).flags.c_contiguous


def test_windows_stay_small_and_right_however_long_the_rows_become():
    rows = Rows("gemma3_text", [4 * WINDOW, 2], seed=1)
    rows.tokens[0] += rows.some(STEP + 100)
    rows.batch = kv.merge(
        [fed("gemma3_text", rows.model, tokens) for tokens in rows.tokens], own_ends=True
    )
    window = next(cache for cache in rows.batch if cache.window)
    n_slots = []
    for _ in range(2 * STEP // 64):
        tokens = [rows.some(64) for _ in rows.tokens]
        logits = rows.model(mx.array(tokens), cache=rows.batch)
        for row, more in enumerate(tokens):
            rows.tokens[row] += more
        n_slots.append(window._n_slots)
    rows.compare(0, logits[0, -8:])
    rows.compare(1, logits[1, -8:])
    assert max(n_slots) <= WINDOW + 2 * STEP
    rows.check_extracted()


def test_a_batch_is_as_large_as_its_longest_row():
    """Also when a longer one has left."""
    rows = Rows("llama", [2 * STEP + 5, 9], seed=4)
    assert {cache._n_slots for cache in rows.batch} == {3 * STEP}
    rows.keep([1])
    assert {cache._n_slots for cache in rows.batch} == {STEP}
    rows.step()
    rows.check_extracted()


def test_rows_without_tokens_join_others():
    rows = Rows("llama", [0, 9], seed=2)
    rows.step()
    rows.check_extracted()


def test_a_copy_of_a_batch_goes_on_alone():
    rows = Rows("llama", [9, 4], seed=3)
    copied = kv.copy_caches(rows.batch)
    rows.step()
    assert [cache.ends for cache in copied] == [[9, 4]] * len(copied)


@pytest.mark.parametrize(
    ("counts", "error"), [([1], CacheMismatch), ([1, 99], UnsupportedCache), ([1, -1], BadInput)]
)
def test_tokens_that_are_not_there_cannot_be_taken_back(counts, error):
    rows = Rows("llama", [9, 4], seed=3)
    with pytest.raises(error):
        kv.trim(rows.batch, counts)
    assert rows.batch[0].ends == [9, 4]


def test_a_batch_that_ends_together_takes_back_nothing_row_by_row():
    rows = Rows("llama", [9, 4], seed=3)
    together = kv.merge([kv.extract(rows.batch, row) for row in (0, 1)])
    with pytest.raises(UnsupportedCache, match="own_ends"):
        kv.trim(together, [1, 1])


def test_rows_with_their_own_ends_take_no_padding():
    rows = Rows("llama", [9, 4], seed=3)
    with pytest.raises(UnsupportedCache, match="padding"):
        kv.prepare(rows.batch, kv.RightPadding((2, 1)))


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "qwen3_next"])
def test_a_sequence_with_states_forgets_tokens_by_the_states_before_them(family):
    model = tiny(family)
    caches, cold = (kv.make_caches(model) for _ in range(2))
    for one in (caches, cold):
        mx.eval(model(mx.array([[5, 6, 7]]), cache=one))
    states = kv.states_of(caches)
    mx.eval(model(mx.array([[8, 9]]), cache=caches))
    with pytest.raises(UnsupportedCache, match="cannot forget 2 tokens"):
        kv.trim(caches, 2)
    kv.trim(caches, 2, states)
    again, wanted = (model(mx.array([[4]]), cache=one) for one in (caches, cold))
    assert mx.array_equal(again, wanted)
