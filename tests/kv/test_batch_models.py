"""Models in a batch, with `kv.batch` and with BatchGenerator, against cold runs."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.errors import UnsupportedCache
from keepwarm.kv.assembly import reconstruct_cache
from keepwarm.kv.batch import (
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
from keepwarm.kv.kinds import KINDS, token_count
from keepwarm.kv.layout import probe
from keepwarm.kv.padding import LeftPadding, RightPadding, TwoSidedPadding
from keepwarm.kv.slices import Block, cut_blocks
from tests.kit.compare import assert_differs, assert_same, differences
from tests.kit.models import ARCHITECTURES
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

UNBATCHABLE = ["deepseek_v41", "llama4"]
BATCHABLE = sorted(ARCHITECTURES.keys() - set(UNBATCHABLE))
# These two fold the padding of a prompt into their state, whatever their cache says.
PADDABLE = sorted(set(BATCHABLE) - {"mamba", "recurrent_gemma"})
every_batchable = pytest.mark.parametrize("name", BATCHABLE)
every_paddable = pytest.mark.parametrize("name", PADDABLE)

N = 4
PROMPTS = [prompt_of(70, seed=1), prompt_of(20, seed=2), prompt_of(41, seed=3)]
LATE = prompt_of(50, seed=4)


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


def among_copies(model, prompt, n, *, step):
    """A cold run in a batch with a copy of itself: no padding, no joins, two rows in each sum."""
    held = prefill(model, make_prompt_cache(model), prompt[:-1], step)
    return Rows(model, merge([held, held]), prompt[-1:] * 2).step(n).run(0)


def arrays_of(caches):
    return [array for cache in caches for array in encode(cache).arrays()]


@every_batchable
def test_rows_join_and_leave_as_if_each_were_alone(name, tiny_model):
    """Dynamic batching; the donors stay as they were."""
    model = tiny_model(name)
    donors = [held_by(model, prompt) for prompt in PROMPTS]
    before = [mx.array(array) for caches in donors for array in arrays_of(caches)]
    rows = Rows(model, merge(donors), [prompt[-1] for prompt in PROMPTS]).step(2)
    rows.join([held_by(model, LATE)], LATE[-1:])
    rows.step(2)
    rows.keep([3, 0, 2])  # row 1 leaves, the latest comes first
    rows.step(N)
    for row, prompt in enumerate([LATE, PROMPTS[0], PROMPTS[2]]):
        run = rows.run(row)
        alone = cold(model, prompt, len(run.tokens), step=16)
        # A fast BLAS sums one row and several in another order: 1.7e-4 on deepseek_v3 with NVPL,
        # copies of one prompt included. With MLX's own BLAS all of it is bit-equal.
        copies = among_copies(model, prompt, len(run.tokens), step=16)
        noise = max(differences(alone, copies)) if name == "deepseek_v3" else 0.0
        assert_same(alone, run, noise=noise)
    after = [array for caches in donors for array in arrays_of(caches)]
    assert all(mx.array_equal(a, b) for a, b in zip(before, after, strict=True))


@every_batchable
def test_beams_fork_from_one_row(name, tiny_model):
    """A row is extracted twice and continues with two tokens."""
    model = tiny_model(name)
    rows = prefilled_rows(model, PROMPTS).step(2)
    (first, _), _ = rows.seen[0]
    picked = rows.next[0]
    tokens = [picked, (picked + 1) % 128]
    beams = Rows(model, merge([extract(rows.batch, 0), extract(rows.batch, 0)]), tokens).step(N)
    for beam, token in enumerate(tokens):
        assert_same(cold(model, [*PROMPTS[0], first, token], N), beams.run(beam))
    assert_differs(beams.run(0), beams.run(1))
    rows.step(2)
    assert_same(cold(model, PROMPTS[0], 4, step=16), rows.run(0))


@every_batchable
def test_an_extracted_row_goes_on_alone_and_in_a_generator(name, tiny_model):
    """Through BatchGenerator too, with a row that has no cache and joins late."""
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


@every_batchable
def test_a_neighbours_row_is_another_run(name, tiny_model):
    """The control: the same prompt from the wrong row, or with rows in the wrong order."""
    model = tiny_model(name)
    rows = prefilled_rows(model, [PROMPTS[0], PROMPTS[2]])
    wrong = extract(rows.batch, 1)
    reference = cold(model, PROMPTS[0], N, step=16)
    (run,) = batched(model, [Job(PROMPTS[0][-1:], N, PROMPTS[0][:-1], wrong)])
    assert_differs(reference, run)
    rows.batch = merge([extract(rows.batch, i) for i in (1, 0)])
    assert_differs(reference, rows.step(N).run(0))


@every_paddable
def test_prompts_padded_on_the_left_get_their_cold_runs(name, tiny_model):
    model = tiny_model(name)
    longest = max(map(len, PROMPTS))
    padding = LeftPadding(tuple(longest - len(p) for p in PROMPTS))
    batch = empty_batch(make_prompt_cache(model), len(PROMPTS))
    prepare(batch, padding)
    padded = [[0] * n + p[:-1] for n, p in zip(padding.amounts, PROMPTS, strict=True)]
    model(mx.array(padded), cache=batch)
    rows = Rows(model, batch, [p[-1] for p in PROMPTS]).step(N)
    for row, prompt in enumerate(PROMPTS):
        assert_same(cold(model, prompt, N), rows.run(row))


@every_paddable
def test_prompts_padded_on_the_right_get_their_cold_runs(name, tiny_model):
    """Twice over, the second time behind what is already held; then rows leave."""
    model = tiny_model(name)
    batch = empty_batch(make_prompt_cache(model), len(PROMPTS))
    halves = [[p[: len(p) // 2] for p in PROMPTS], [p[len(p) // 2 : -1] for p in PROMPTS]]
    for parts in halves:
        lengths = tuple(map(len, parts))
        prepare(batch, RightPadding(lengths))
        model(mx.array([p + [0] * (max(lengths) - len(p)) for p in parts]), cache=batch)
        finalize(batch)
    rows = Rows(model, batch, [p[-1] for p in PROMPTS]).step(1)
    rows.keep([1, 2])
    rows.step(N - 1)
    for row, prompt in enumerate(PROMPTS[1:]):
        assert_same(cold(model, prompt, N), rows.run(row))


@every_paddable
def test_prompts_padded_on_both_sides_get_their_cold_runs(name, tiny_model):
    model = tiny_model(name)
    batch = empty_batch(make_prompt_cache(model), 2)
    prepare(batch, TwoSidedPadding(LeftPadding((3, 0)), RightPadding((3 + 19, 40))))
    fed = [[0] * 3 + PROMPTS[1][:-1] + [0] * 18, PROMPTS[2][:-1]]
    model(mx.array(fed), cache=batch)
    finalize(batch)
    rows = Rows(model, batch, [PROMPTS[1][-1], PROMPTS[2][-1]]).step(N)
    for row, prompt in enumerate(PROMPTS[1:]):
        assert_same(cold(model, prompt, N), rows.run(row))


@pytest.mark.parametrize("name", ["mamba", "recurrent_gemma", "jamba", "rwkv7"])
def test_models_that_fold_padding_into_their_state_are_refused_it(name, tiny_model):
    """Nothing in their caches shows it before; rows of equal length need no padding."""
    model = tiny_model(name)
    for padding in (
        LeftPadding((0, 2)),
        RightPadding((4, 2)),
        TwoSidedPadding(LeftPadding((1, 0)), RightPadding((4, 4))),
    ):
        batch = empty_batch(make_prompt_cache(model), 2)
        prepare(batch, padding)
        model(mx.array([LATE[:4], LATE[4:8]]), cache=batch)
        with pytest.raises(UnsupportedCache, match=r"takes padding for tokens of its state; build"):
            finalize(batch)
    batch = empty_batch(make_prompt_cache(model), 2)
    prepare(batch, RightPadding((4, 4)))
    model(mx.array([LATE[:4], LATE[4:8]]), cache=batch)
    finalize(batch)
    rows = Rows(model, batch, LATE[8:10]).step(N)
    for row in range(2):
        assert_same(cold(model, [*LATE[4 * row :][:4], LATE[8 + row]], N), rows.run(row))


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "gemma4_text"])
def test_slices_between_decode_steps_are_masked_right(name, tiny_model):
    """Rotated rings are fed a slice; short rows still attend to everything."""
    model = tiny_model(name)
    rows = prefilled_rows(model, PROMPTS).step(2)
    fed = [[*PROMPTS[i], *(t for t, _ in rows.seen[i][:-1])] for i in range(3)]
    prepare(rows.batch, RightPadding((4, 4, 4)))
    slices = [[rows.next[i], *LATE[i : i + 3]] for i in range(3)]
    model(mx.array(slices), cache=rows.batch)
    finalize(rows.batch)
    again = Rows(model, rows.batch, LATE[10:13]).step(N)
    for i in range(3):
        assert_same(cold(model, [*fed[i], *slices[i], LATE[10 + i]], N), again.run(i))


@pytest.mark.parametrize("name", ["deepseek_v32", "falcon_h1", "gemma3_text", "llama", "mamba2"])
def test_a_saved_batch_goes_on(name, tiny_model):
    """Rings, padding and states included."""
    model = tiny_model(name)
    rows = prefilled_rows(model, PROMPTS).step(2)
    rows.batch = copy_caches(rows.batch)
    rows.step(3)
    for row, prompt in enumerate(PROMPTS):
        assert_same(cold(model, prompt, 5, step=16), rows.run(row))


@pytest.mark.parametrize("name", UNBATCHABLE)
def test_models_without_batches_are_refused_before_any_generator(name, tiny_model):
    """With layer, class and reason."""
    model = tiny_model(name)
    caches = held_by(model, PROMPTS[0])
    assert not can_batch(caches)
    with pytest.raises(UnsupportedCache, match=r"Row 0, layer 0: .* has no batched form"):
        merge([caches, caches])


@every_batchable
def test_batchable_models_say_so(name, tiny_model):
    assert can_batch(make_prompt_cache(tiny_model(name)))
    assert can_batch(held_by(tiny_model(name), PROMPTS[0]))


# --- Blocks, files, and back into the generator ------------------------------------------------

LONG = prompt_of(270, seed=5)


class Answer:
    """What BatchGenerator gave for one prompt; `caches` is what was handed to it, checked."""

    def __init__(self, model, rest, n, held=(), cache=None, stop=()):
        generator = BatchGenerator(model, max_tokens=n, stop_tokens=[[t] for t in stop])
        caches = [cache]
        assert_cache_objects(caches)
        generator.insert([list(rest)], caches=caches, all_tokens=[list(held)])
        self.tokens, logprobs = [], []
        while responses := generator.next_generated():
            (last,) = responses
            self.tokens.append(last.token)
            logprobs.append(last.logprobs)
        generator.close()
        self.reason, self.cache, self.all_tokens = (
            last.finish_reason,
            last.prompt_cache,
            last.all_tokens,
        )
        self.run = Run(self.tokens, mx.stack(logprobs), self.cache)


def assert_cache_objects(caches):
    """List[list[cache object]]; arrays are MLX's, and no tuple or ndarray is a cache."""
    assert type(caches) is list
    for cache in caches:
        assert cache is None or (type(cache) is list and all(type(c) in KINDS for c in cache))
        for array in arrays_of(cache or []):
            assert type(array) is mx.array


@pytest.mark.parametrize("wrong", [(mx.zeros((1, 1, 1, 1)),) * 2, np.zeros((1, 1, 1, 1))])
def test_tuples_and_arrays_are_no_caches(wrong):
    """The check above can fail."""
    with pytest.raises(AssertionError):
        assert_cache_objects([[wrong]])


@every_batchable
def test_submit_with_cache_reconstructs(name, tiny_model):
    """Blocks are cut, rebuilt, handed over; the rest is prefilled."""
    model = tiny_model(name)
    live = prefill(model, make_prompt_cache(model), LONG[:-8], step=100)
    blocks = list(cut_blocks(live, len(LONG) - 8))
    restored = reconstruct_cache(probe(model, make_prompt_cache(model)), blocks)
    counter = FedCounter(model)
    answer = Answer(counter, LONG[-8:], N, LONG[:-8], restored)
    assert_same(cold(model, LONG, N, step=100), answer.run)
    assert counter.prefilled == 7
    wrong = Answer(model, LONG[-8:], N, LONG[:-8], held_by(model, LATE)).run
    assert_differs(cold(model, LONG, N), wrong)


def save_blocks(path, blocks):
    tensors = {}
    for block in blocks:
        tensors |= {**block.delta, **block.window, **block.state}
    parts = [
        {
            "index": block.index,
            "n_tokens": block.n_tokens,
            "first_rows": block.first_rows,
            **{part: list(getattr(block, part)) for part in ("delta", "window", "state")},
        }
        for block in blocks
    ]
    mx.save_safetensors(str(path), tensors, {"blocks": json.dumps(parts)})


def load_blocks(path):
    tensors, metadata = mx.load(str(path), return_metadata=True)
    for part in json.loads(metadata["blocks"]):
        named = {kind: {n: tensors[n] for n in part[kind]} for kind in ("delta", "window", "state")}
        yield Block(**{**part, **named})


@pytest.mark.parametrize(
    ("name", "ending"), [*((name, "length") for name in BATCHABLE), ("gemma3_text", "stop")]
)
def test_cache_roundtrip_e2e(name, ending, tiny_model, tmp_path):
    """Generate, cut, save, load, submit again; the same tokens as
    without."""
    model = tiny_model(name)
    first = Answer(model, LONG, N)
    total = len(first.all_tokens)
    assert first.all_tokens == [*LONG, *first.tokens]
    save_blocks(tmp_path / "blocks.safetensors", list(cut_blocks(first.cache, total)))
    layout = probe(model, make_prompt_cache(model))
    loaded = reconstruct_cache(layout, load_blocks(tmp_path / "blocks.safetensors"), total)
    layout.check(loaded)
    assert len(loaded) == len(first.cache)
    assert token_count(loaded) == token_count(first.cache)
    prompt = [*first.all_tokens, *LATE[:9]]
    stop = [] if ending == "length" else cold(model, prompt, N).tokens[2:3]
    without = Answer(model, prompt, N, stop=stop)
    answer = Answer(model, LATE[:9], N, first.all_tokens, loaded, stop)
    assert (without.reason, answer.reason) == (ending, ending)
    assert answer.tokens == without.tokens
    assert_same(without.run, answer.run)
