"""What was computed once is found again, to the token, on every kind of layer."""

from contextlib import closing
from dataclasses import replace
from functools import cache

import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.cache.restore.loading import Reader
from keepwarm.cache.restore.plan import Point
from keepwarm.cache.restore.rates import Rates
from keepwarm.cache.restore.restorer import WORTH_SAVING, Plan, Restorer
from keepwarm.cache.restore.writing import MemorySaver, Writer
from keepwarm.kv.kinds import Kind
from keepwarm.kv.layout import probe
from keepwarm.prefix.blocks import Namespace
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Part
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers
from tests.kit.compare import assert_same
from tests.kit.models import LAYER_KINDS
from tests.kit.runs import FedCounter, cold, continue_from, prefill, prompt_of

NAMESPACE = Namespace(bytes(range(32)))
PROMPT = prompt_of(628)
N = 5


def restorer(model, tier):
    layout = probe(model, make_prompt_cache(model))
    rates = Rates(load_bytes_per_s=1e12, prefill_tokens_per_s=1e-3)
    tiers = Tiers([("tier", tier)])
    return Restorer(NAMESPACE, layout, tiers, Reader(tiers, n_threads=1), MemorySaver(tier), rates)


def compute(model, kept, tokens, restored, checkpoints=()):
    """Prefill what is not restored, block by block, keeping it; answers with the caches."""
    capture = kept.open(tokens)
    caches, at = restored.caches or make_prompt_cache(model), restored.n_tokens
    capture.start_at(at)
    stops = sorted({*range(256, len(tokens), 256), *checkpoints, len(tokens)})
    for stop in (s for s in stops if s > at):
        prefill(model, caches, tokens[at:stop])
        at = stop
        capture.capture(caches, at, checkpoint=at in checkpoints)
    capture.finish(tokens, caches)
    return caches


@pytest.fixture(params=["memory", "disk"])
def tier(request, tmp_path):
    made = (
        MemoryTier(1 << 30)
        if request.param == "memory"
        else DiskTier(tmp_path / "store", DiskLimits(min_free_bytes=0))
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(tiny_model):
    return cache(lambda name, prompt: cold(tiny_model(name), list(prompt), N, step=256))


@pytest.mark.parametrize("name", LAYER_KINDS[:4])
def test_an_identical_request_reuses_all_but_its_last_token(name, tier, tiny_model, reference):
    """For every cache class the same prompt again feeds one token (a checkpoint there)."""
    model = tiny_model(name)
    kept = restorer(model, tier)
    compute(model, kept, PROMPT, kept.restore(PROMPT), checkpoints=[len(PROMPT) - 1])
    restored = kept.restore(PROMPT)
    assert restored.n_tokens == len(PROMPT) - 1
    counter = FedCounter(model)
    run = continue_from(counter, restored.caches, PROMPT[-1:], N)
    assert_same(reference(name, tuple(PROMPT)), run)
    assert counter.fed == 1 + N


@pytest.mark.parametrize("n_tokens", [256, 512])
def test_prompt_of_whole_blocks_reuses_all_but_its_last_token(n_tokens, tier, tiny_model):
    """The last block has the window before its end, not that before the last token."""
    model, prompt = tiny_model("gemma3_text"), PROMPT[:n_tokens]
    kept = restorer(model, tier)
    compute(model, kept, prompt, kept.restore(prompt), checkpoints=[n_tokens - 1])
    restored = kept.restore(prompt)
    assert restored.n_tokens == n_tokens - 1
    run = continue_from(model, restored.caches, prompt[-1:], N)
    assert_same(cold(model, prompt, N), run)


@pytest.mark.parametrize("name", LAYER_KINDS[:4])
def test_a_sibling_reuses_the_shared_part_to_the_token(name, tier, tiny_model, reference):
    """Two prompts share 600 tokens; state layers go back to their last checkpoint."""
    model = tiny_model(name)
    kept = restorer(model, tier)
    compute(model, kept, PROMPT, kept.restore(PROMPT), checkpoints=[555])
    other = PROMPT[:600] + prompt_of(50, seed=4)
    restored = kept.restore(other)
    assert restored.n_tokens == (555 if Kind.STATE in kept.layout.kinds else 600)
    run = continue_from(model, restored.caches, other[restored.n_tokens :], N)
    assert_same(reference(name, tuple(other)), run)


@pytest.mark.parametrize(
    ("name", "stored"),
    [("falcon_h1", (600, True, True, True)), ("mamba2", (600, True, True, False))],
)
def test_a_prompt_is_known_where_it_cannot_be_restored(name, stored, tiny_model):
    """No state was kept at the place."""
    model = tiny_model(name)
    kept = restorer(model, MemoryTier(1 << 30))
    compute(model, kept, PROMPT, kept.restore(PROMPT))
    other = PROMPT[:600] + prompt_of(50, seed=4)
    assert kept.restore(other).n_tokens == 0
    assert kept.stored_prefix(other) == stored
    assert kept.stored_prefix(PROMPT) == (len(PROMPT), False, *stored[2:])


def test_the_opening_of_a_template_is_not_loaded(tiny_model):
    """Every prompt has it; it would be read for every one."""
    model = tiny_model("llama")
    kept = restorer(model, MemoryTier(1 << 30))
    compute(model, kept, PROMPT, kept.restore(PROMPT))
    n_planned = [kept.plan([*PROMPT[:n], *prompt_of(50, seed=4)]).n_tokens for n in (4, 15, 16)]
    assert n_planned == [0, 0, 16]


def test_a_place_survives_if_nearly_all_of_it_is_on_disk(tiny_model, tmp_path):
    model, memory = tiny_model("llama"), MemoryTier(1 << 30)
    with closing(DiskTier(tmp_path / "store", DiskLimits(min_free_bytes=0))) as disk:
        kept = restorer(model, disk)
        compute(model, kept, PROMPT, kept.restore(PROMPT))
        both = replace(kept, tiers=Tiers([("memory", memory), ("disk", disk)]))
        assert [both.n_on_disk(PROMPT[:n]) for n in (1, 2, 3)] == [0, 1, 2]
        assert both.survives(PROMPT)
        assert both.survives([*PROMPT, *range(WORTH_SAVING - 1)])
        assert not both.survives([*PROMPT, *range(WORTH_SAVING)])
        assert both.survives([8] * (WORTH_SAVING - 1)), "nothing of it is, and it is soon computed"
        assert not both.survives([8] * WORTH_SAVING)
        assert replace(kept, tiers=Tiers([("memory", memory)])).survives([1, 2, 3])


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
def test_a_growing_conversation_recomputes_only_what_is_new(name, tier, tiny_model, reference):
    """The open block is kept too, so each turn goes on from the token where the last ended."""
    model = tiny_model(name)
    kept = restorer(model, tier)
    tokens = []
    for turn in range(4):
        held = len(tokens)
        tokens = tokens + prompt_of(150, seed=turn + 20)
        restored = kept.restore(tokens)
        assert restored.n_tokens == held
        compute(model, kept, tokens, restored)
    assert_same(
        reference(name, (*tokens, 3)),
        continue_from(model, kept.restore([*tokens, 3]).caches, [3], N),
    )


@pytest.mark.parametrize("name", ["falcon_h1", "mamba"])
def test_who_stops_at_the_end_of_a_block_has_its_state(name, tier, tiny_model, reference):
    """The block was kept as it was passed, without a state: nobody knew that it would end there."""
    model = tiny_model(name)
    kept = restorer(model, tier)
    capture, caches = kept.open(PROMPT), make_prompt_cache(model)
    prefill(model, caches, PROMPT[:512])
    capture.capture(caches, 512)
    assert kept.restore(PROMPT).n_tokens == 0
    capture.capture(caches, 512, checkpoint=True)
    restored = kept.restore(PROMPT)
    assert restored.n_tokens == 512
    run = continue_from(model, restored.caches, PROMPT[512:], N)
    assert_same(reference(name, tuple(PROMPT)), run)


def test_temporary_open_block_is_in_memory_only(tiny_model, tmp_path):
    """A longer one is written soon; the whole blocks before it are."""
    model, memory = tiny_model("llama"), MemoryTier(1 << 30)
    with closing(DiskTier(tmp_path / "store", DiskLimits(min_free_bytes=0))) as disk:
        writer = Writer(memory, disk, 64 << 20)
        capture = replace(restorer(model, memory), writer=writer).open(PROMPT)
        caches = prefill(model, make_prompt_cache(model), PROMPT[:600])
        capture.capture(caches, 600, checkpoint=True, temporary=True)
        writer.close()
        lengths = [sorted(block.n_tokens for block in tier.walk()) for tier in (memory, disk)]
    assert lengths == [[88, 256, 256], [256, 256]]


class NotedStates(MemorySaver):
    """Notes the lengths of blocks with a state that go to disk; a second memory stands for it."""

    def __init__(self, memory, disk):
        super().__init__(memory)
        self.disk, self.noted = disk, []

    def put(self, record, policy, memory_only=False, share=None):
        super().put(record, policy, memory_only)
        if policy.to_disk and not memory_only:
            self.disk.put(record)
            if record.header.part is Part.STATE:
                self.noted.append(len(record.header.tokens) // 4)


@pytest.mark.parametrize("policy", [Policy.READ_WRITE, Policy.DURABLE])
def test_of_states_near_each_other_one_goes_to_disk(policy, tiny_model):
    """Each is as large as thousands of tokens, and spares a few only after a restart."""
    model, memory, disk = tiny_model("falcon_h1"), MemoryTier(1 << 30), MemoryTier(1 << 30)
    saver, caches = NotedStates(memory, disk), make_prompt_cache(model)
    tiers = Tiers([("memory", memory), ("disk", disk)])
    kept = replace(restorer(model, memory), tiers=tiers, writer=saver)
    at = 0
    for stops in ([100, 115, 131], [134, 160, 163]):
        capture = kept.open(PROMPT[: stops[-1] + 1], policy)
        capture.start_at(at)
        for stop in stops:
            prefill(model, caches, PROMPT[at:stop])
            at = stop
            capture.capture(caches, at, checkpoint=True)
        prefill(model, caches, PROMPT[at : stops[-1] + 2])
        at = stops[-1] + 2
        capture.finish(PROMPT[:at], caches)
    everything = [100, 115, 131, 133, 134, 160, 163, 165]
    wanted = {Policy.READ_WRITE: [100, 131, 133, 160, 165], Policy.DURABLE: everything}
    assert saver.noted == wanted[policy]
    assert all(kept.restore(PROMPT[: n + 1]).n_tokens == n for n in saver.noted[-3:])


def test_a_state_near_one_that_is_only_in_memory_goes_to_disk(tiny_model):
    model, memory, disk = tiny_model("falcon_h1"), MemoryTier(1 << 30), MemoryTier(1 << 30)
    tiers, saver = Tiers([("memory", memory), ("disk", disk)]), NotedStates(memory, disk)
    kept = replace(restorer(model, memory), tiers=tiers, writer=saver)
    caches = prefill(model, make_prompt_cache(model), PROMPT[:133])
    kept.open(PROMPT[:133], Policy.EPHEMERAL).finish(PROMPT[:133], caches)
    capture = kept.open(PROMPT[:160])
    capture.start_at(133)
    capture.capture(prefill(model, caches, PROMPT[133:134]), 134, checkpoint=True)
    assert saver.noted == [134]


def test_policies(tier, tiny_model):
    model = tiny_model("llama")
    kept = restorer(model, tier)
    for policy in (Policy.NO_STORE, Policy.READ_ONLY):
        capture = kept.open(PROMPT, policy)
        capture.finish(PROMPT, prefill(model, make_prompt_cache(model), PROMPT))
    assert not list(tier.walk())
    compute(model, kept, PROMPT, kept.restore(PROMPT))
    assert kept.restore(PROMPT, Policy.READ_ONLY).n_tokens == len(PROMPT) - 1
    assert kept.restore(PROMPT, Policy.NO_STORE).n_tokens == 0


@pytest.mark.parametrize(("load_s", "in_background"), [(0.015, False), (0.05, True)])
def test_only_a_short_load_keeps_others_waiting(tier, tiny_model, load_s, in_background):
    """What a step takes: a running answer waits no longer than that."""
    model = tiny_model("llama")
    kept = restorer(model, tier)
    compute(model, kept, PROMPT, kept.restore(PROMPT))
    n_bytes = kept.plan(PROMPT).point.n_bytes
    kept.rates = Rates(load_bytes_per_s=n_bytes / load_s, prefill_tokens_per_s=1)
    for others_wait in (False, True):
        loading = kept.begin(PROMPT, Policy.READ_ONLY, others_wait=others_wait)
        assert loading.in_background == (in_background and others_wait)
        assert loading.finish().restored.n_tokens == len(PROMPT) - 1


def test_a_slow_tier_loses_to_recomputing(tier, tiny_model):
    model = tiny_model("llama")
    kept = restorer(model, tier)
    compute(model, kept, PROMPT, kept.restore(PROMPT))
    kept.rates = Rates(load_bytes_per_s=1e3, prefill_tokens_per_s=1e9)
    plan = kept.plan(PROMPT)
    assert plan.n_tokens == len(PROMPT) - 1
    assert plan.point.n_bytes > 600 * 2 * 2 * 2 * 64 * 4
    assert not plan.is_worth_loading()
    assert kept.restore(PROMPT).caches is None


@pytest.mark.parametrize(
    ("beyond", "load_s", "is_worth"),
    [
        (0, 0.8, True),  # 80 tokens at 100 a second
        (0, 0.81, False),
        (60, 0.2, True),
        (60, 0.21, False),
        (79, 0.019, True),  # too quick to be measured
        (80, 0.0, False),
        (90, 0.0, False),
    ],
)
def test_loading_is_weighed_against_what_it_spares_beyond_the_live_cache(beyond, load_s, is_worth):
    """Every path asks here whether stored blocks or a live cache are used."""
    plan = Plan(Point(80, (), 0), load_s, Rates(prefill_tokens_per_s=100.0))
    assert plan.is_worth_loading(beyond) is is_worth


def test_an_aborted_request_keeps_its_finished_blocks(tier, tiny_model):
    model = tiny_model("llama")
    kept = restorer(model, tier)
    capture = kept.open(PROMPT)
    capture.capture(prefill(model, make_prompt_cache(model), PROMPT[:600]), 600)
    assert kept.restore(PROMPT).n_tokens == 512
