"""Models in a batch, with `kv.batch` and with BatchGenerator, against cold runs."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.errors import UnsupportedCache
from keepwarm.kv.assembly import reconstruct_cache
from keepwarm.kv.batch import (
    LeftPadding,
    RightPadding,
    TwoSidedPadding,
    can_batch,
    empty_batch,
    extend,
    extract,
    filter_rows,
    finalize,
    merge,
    prepare,
)
from keepwarm.kv.codec import copy_caches, encode
from keepwarm.kv.layout import probe
from keepwarm.kv.slices import cut_blocks
from tests.kit.compare import assert_differs, assert_same
from tests.kit.runs import (
    FedCounter,
    Job,
    Run,
    batched,
    cold,
    continue_from,
    prefill,
    prompt_of,
)

# One model of each combination of layers; engine/test_exactness.py runs every architecture.
BATCHABLE = ["llama", "gemma3_text", "mamba2", "falcon_h1", "recurrent_gemma"]
FOLDING = ["mamba", "recurrent_gemma"]  # they fold the padding of a prompt into their state
every_batchable = pytest.mark.parametrize("name", BATCHABLE)
every_paddable = pytest.mark.parametrize("name", sorted(set(BATCHABLE) - set(FOLDING)))

N = 4
PROMPTS = [prompt_of(70, seed=1), prompt_of(20, seed=2), prompt_of(41, seed=3)]
LATE = prompt_of(50, seed=4)
LONG = prompt_of(270, seed=5)


class Rows:
    """Greedy decoding of the rows of one batch, by our own functions alone."""

    def __init__(self, model, batch, last):
        self.model = model
        self.batch = batch
        self.next = list(last)
        self.seen = [[] for _ in self.next]

    def step(self, n):
        for _ in range(n):
            logits = self.model(mx.array(self.next)[:, None], cache=self.batch)[:, -1]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            self.next = mx.argmax(logprobs, axis=-1).tolist()
            for seen, token, row in zip(self.seen, self.next, logprobs, strict=True):
                seen.append((token, row))
        return self

    def join(self, caches, last):
        extend(self.batch, merge(caches))
        self.next += last
        self.seen += [[] for _ in last]

    def keep(self, rows):
        filter_rows(self.batch, rows)
        self.next = [self.next[i] for i in rows]
        self.seen = [list(self.seen[i]) for i in rows]

    def run(self, row):
        tokens, logprobs = zip(*self.seen[row], strict=True)
        return Run(list(tokens), mx.stack(logprobs), [])


def held_by(model, prompt, fresh=make_prompt_cache):
    """Single caches that hold all of a prompt but its last token."""
    return prefill(model, fresh(model), prompt[:-1], step=16)


def prefilled_rows(model, prompts, fresh=make_prompt_cache):
    caches = [held_by(model, prompt, fresh) for prompt in prompts]
    return Rows(model, merge(caches), [prompt[-1] for prompt in prompts])


def arrays_of(caches):
    return [array for cache in caches for array in encode(cache).arrays()]


def check_cold(model, rows, prompts):
    for row, prompt in enumerate(prompts):
        run = rows.run(row)
        assert_same(cold(model, prompt, len(run.tokens), step=16), run)


@every_batchable
def test_rows_join_and_leave_as_if_each_were_alone(name, tiny_model):
    """Dynamic batching; the donors stay as they were."""
    model = tiny_model(name)
    donors = [held_by(model, prompt) for prompt in PROMPTS]
    assert can_batch(donors[0])
    assert can_batch(make_prompt_cache(model))
    before = [mx.array(array) for caches in donors for array in arrays_of(caches)]
    rows = Rows(model, merge(donors), [prompt[-1] for prompt in PROMPTS]).step(2)
    rows.join([held_by(model, LATE)], LATE[-1:])
    rows.step(2)
    rows.keep([3, 0, 2])  # row 1 leaves, the latest comes first
    rows.batch = copy_caches(rows.batch)  # as if saved
    rows.step(N)
    check_cold(model, rows, [LATE, PROMPTS[0], PROMPTS[2]])
    after = [array for caches in donors for array in arrays_of(caches)]
    assert all(mx.array_equal(a, b) for a, b in zip(before, after, strict=True))


@every_batchable
def test_an_extracted_row_goes_on_alone_and_in_a_generator(name, tiny_model):
    """With a neighbour that has no cache and joins late; the wrong row gives another run."""
    model = tiny_model(name)
    rows = prefilled_rows(model, PROMPTS).step(3)
    answered = [token for token, _ in rows.seen[1]]
    held = [*PROMPTS[1], *answered[:-1]]
    rest = [*answered[-1:], *LATE[:9]]
    caches = extract(rows.batch, 1)
    reference = cold(model, [*held, *rest], N)
    run, neighbour = batched(model, [Job(rest, N, held, caches), Job(LATE, N, joins_at=2)])
    assert_same(reference, run)
    assert_same(cold(model, LATE, N), neighbour)
    assert_same(reference, continue_from(model, copy_caches(caches), rest, N))
    assert_differs(reference, continue_from(model, extract(rows.batch, 2), rest, N))


@every_paddable
def test_prompts_padded_on_either_side_get_their_cold_runs(name, tiny_model):
    """On the right twice over, the second time behind what is held; then rows leave."""
    model = tiny_model(name)
    shorts = [prompt[:-1] for prompt in PROMPTS[1:]]
    left = LeftPadding((21, 0))
    both = TwoSidedPadding(LeftPadding((3, 0)), RightPadding((3 + 19, 40)))
    slices = {
        left: [[0] * 21 + shorts[0], shorts[1]],
        both: [[0] * 3 + shorts[0] + [0] * 18, shorts[1]],
    }
    for padding, fed in slices.items():
        batch = empty_batch(make_prompt_cache(model), 2)
        prepare(batch, padding, model)
        model(mx.array(fed), cache=batch)
        finalize(batch)
        check_cold(model, Rows(model, batch, [p[-1] for p in PROMPTS[1:]]).step(N), PROMPTS[1:])
    batch = empty_batch(make_prompt_cache(model), len(PROMPTS))
    halves = [[p[: len(p) // 2] for p in PROMPTS], [p[len(p) // 2 : -1] for p in PROMPTS]]
    for parts in halves:
        lengths = tuple(map(len, parts))
        prepare(batch, RightPadding(lengths))
        model(mx.array([p + [0] * (max(lengths) - len(p)) for p in parts]), cache=batch)
        finalize(batch)
    rows = Rows(model, batch, [p[-1] for p in PROMPTS]).step(1)
    rows.keep([1, 2])
    check_cold(model, rows.step(N - 1), PROMPTS[1:])


@pytest.mark.parametrize("name", FOLDING)
def test_models_that_fold_padding_into_their_state_are_refused_it(name, tiny_model):
    """By name where the model is given, else when they were fed; equal rows need no padding."""
    model = tiny_model(name)
    for padding in (
        LeftPadding((0, 2)),
        RightPadding((4, 2)),
        TwoSidedPadding(LeftPadding((1, 0)), RightPadding((4, 4))),
    ):
        batch = empty_batch(make_prompt_cache(model), 2)
        with pytest.raises(UnsupportedCache, match=f"^{name} takes padding for tokens of its"):
            prepare(batch, padding, model)
        prepare(batch, padding)
        model(mx.array([LATE[:4], LATE[4:8]]), cache=batch)
        with pytest.raises(UnsupportedCache, match=r"takes padding for tokens of its state; build"):
            finalize(batch)
    batch = empty_batch(make_prompt_cache(model), 2)
    prepare(batch, RightPadding((4, 4)), model)
    model(mx.array([LATE[:4], LATE[4:8]]), cache=batch)
    finalize(batch)
    rows = Rows(model, batch, LATE[8:10]).step(N)
    check_cold(model, rows, [[*LATE[4 * row :][:4], LATE[8 + row]] for row in range(2)])


def test_slices_between_decode_steps_are_masked_right(tiny_model):
    """Rotated rings are fed a slice; short rows still attend to everything."""
    model = tiny_model("gemma3_text")
    rows = prefilled_rows(model, PROMPTS).step(2)
    fed = [[*PROMPTS[i], *(t for t, _ in rows.seen[i][:-1])] for i in range(3)]
    prepare(rows.batch, RightPadding((4, 4, 4)))
    slices = [[rows.next[i], *LATE[i : i + 3]] for i in range(3)]
    model(mx.array(slices), cache=rows.batch)
    finalize(rows.batch)
    again = Rows(model, rows.batch, LATE[10:13]).step(N)
    check_cold(model, again, [[*fed[i], *slices[i], LATE[10 + i]] for i in range(3)])


@pytest.mark.parametrize("name", ["deepseek_v41", "llama4"])
def test_models_without_batches_are_refused_before_any_generator(name, tiny_model):
    """With layer, class and reason."""
    caches = held_by(tiny_model(name), PROMPTS[0])
    assert not can_batch(caches)
    with pytest.raises(UnsupportedCache, match=r"Row 0, layer 0: .* has no batched form"):
        merge([caches, caches])


@every_batchable
def test_blocks_of_an_answer_go_on_in_a_generator(name, tiny_model):
    """Generated, cut, rebuilt and submitted again; only what is new is prefilled."""
    model = tiny_model(name)
    (first,) = batched(model, [Job(LONG, N)])
    held, rest = [*LONG, *first.tokens], LATE[:9]
    layout = probe(model, make_prompt_cache(model))
    restored = reconstruct_cache(layout, cut_blocks(first.cache, len(held)), len(held))
    layout.check(restored)
    counter, reference = FedCounter(model), cold(model, [*held, *rest], N)
    (run,) = batched(counter, [Job(rest, N, held, restored)])
    assert_same(reference, run)
    assert counter.prefilled == len(rest) - 1
    (wrong,) = batched(model, [Job(rest, N, held, held_by(model, LATE))])
    assert_differs(reference, wrong)
