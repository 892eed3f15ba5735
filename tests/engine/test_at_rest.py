"""Blocks that are rounded at rest: restored, told of, and never taken for exact ones."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count

import pytest

from keepwarm.cache.store import Budgets
from keepwarm.engine.batch import Batch
from keepwarm.errors import BadCacheFile
from keepwarm.kv.slabs import SlabPool
from keepwarm.models.load import Model
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Part
from keepwarm.text.request import KVOptions
from tests.kit.engines import ask, engine_on, tokens_of
from tests.kit.runs import prompt_of
from tests.kit.waiting import wait_until

Q8 = KVOptions(at_rest="q8")
READ = Policy.READ_ONLY
SEALED = {"KEEPWARM_ENCRYPTION_KEY": "a secret of more than twenty characters"}
LOSSY = {"q8": 1024, "q4": 512}  # tokens of a prompt that are rounded
SMALLER = {"q8": 2.5, "q4": 1.6}  # times, of fp32: with 4 whole blocks, of which q4 leaves two
WIDE = {"llama": {}, "gemma3_text": {"head_dim": 64}, "falcon_h1": {"head_dim": 64}}
N_PROMPT = 1100


@pytest.fixture(scope="module")
def model(request, models) -> Model:
    return models.of(request.param, **WIDE[request.param])


@pytest.fixture
def pool() -> Iterator[SlabPool]:
    with closing(SlabPool()) as slabs:
        yield slabs


def headers_in(store) -> Iterator[dict]:
    """Those of all records of rows on disk."""
    for path in store.rglob("*.d.safetensors"):
        with path.open("rb") as file:
            yield json.loads(file.read(int.from_bytes(file.read(8), "little")))


def rounded_in(store) -> list[int]:
    """The numbers of the blocks that are rounded on disk."""
    headers = [json.loads(header["__metadata__"]["keepwarm"]) for header in headers_in(store)]
    return sorted(header["number"] for header in headers if "codec" in header["extra"])


def apart(one, other) -> float:
    """The largest difference of a logprob of the first token that both answers show."""
    a, b = (
        {top.token: top.logprob for top in given.choices[0].tokens[0].top} for given in (one, other)
    )
    return max(abs(a[token] - b[token]) for token in a.keys() & b.keys())


@pytest.mark.parametrize(
    ("model", "codec"),
    [("llama", "q8"), ("gemma3_text", "q4"), ("falcon_h1", "q4")],
    indirect=["model"],
)
def test_a_prompt_is_restored_from_fewer_bits(model, codec, tmp_path, pool):
    """By reader threads, as on a CPU, and by the device, as on a GPU."""
    prompt, kv = prompt_of(N_PROMPT), KVOptions(at_rest=codec)
    with engine_on(model, tmp_path, kv=kv) as engine:
        cold = engine.submit(ask(prompt, 4)).result()
        assert cold.receipt.exact
        assert cold.receipt.lossy_tokens is None
    found = []
    with engine_on(model, tmp_path, kv=kv, budgets=Budgets(memory_bytes=0)) as engine:
        for slabs in (None, pool):
            engine.store._reader.slabs = slabs
            engine.call(engine.live.clear).result()
            found.append(engine.submit(ask(prompt, 4, policy=READ)).result())
            receipt = found[-1].receipt
            assert receipt.reused == {"disk": N_PROMPT - 1}
            assert receipt.inexact == (codec,)
            assert receipt.lossy_tokens == LOSSY[codec]
    assert apart(*found) < 1e-4
    assert 0 < apart(found[1], cold) < 0.7  # rows were rounded, and hardly


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_an_answer_whose_batch_was_restored_from_fewer_bits_says_so(model, tmp_path, monkeypatch):
    """It began cold, and its live cache is no exact one either."""
    prompt, feed, n_steps = prompt_of(N_PROMPT), Batch.feed, count(1)

    def fail_once(batch, *given):
        if next(n_steps) == 3:
            engine.store.saver.flush()  # until the blocks in memory are rounded
            raise RuntimeError("once")
        return feed(batch, *given)

    with engine_on(model, tmp_path, kv=Q8) as engine:
        monkeypatch.setattr(Batch, "feed", fail_once)
        first = engine.submit(ask(prompt, 8)).result()
        assert engine.stats().counters["rebuilt_batches"] == 1
        assert (first.receipt.inexact, first.receipt.lossy_tokens) == (("q8",), 1024)
        second = engine.submit(ask([*prompt, *tokens_of(first.choices[0]), 7], 1)).result()
        assert second.receipt.reused.keys() == {"live"}
        assert second.receipt.lossy_tokens == 1024


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_sealed_store_has_rounded_blocks(model, tmp_path, monkeypatch):
    prompt = prompt_of(600)
    for reused in ({}, {"disk": 599}):
        with engine_on(model, tmp_path, kv=Q8, environment=SEALED) as engine:
            receipt = engine.submit(ask(prompt, 1)).result().receipt
            assert receipt.reused == reused
            engine.wait_until_saved()
            blocks = list(engine.store.on_disk.disk.walk())
            n_bytes = sum(sum(block.n_bytes.values()) for block in blocks)
            assert engine.store.on_disk.lossy_bytes() == n_bytes > 0
            monkeypatch.setattr(engine.store.on_disk.disk, "bytes_by_namespace", Counter)
            assert engine.store.on_disk.lossy_bytes() == n_bytes  # not looked at again so soon
    assert receipt.lossy_tokens == 512
    assert all(header["__metadata__"].keys() == {"sealed"} for header in headers_in(tmp_path))


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_blocks_in_memory_are_rounded_too(model, codec, tmp_path):
    """By the thread that writes them; a conversation that comes back is restored from there."""
    prompt, n_bytes = prompt_of(N_PROMPT), {}
    for name in ("exact", codec):
        with engine_on(model, tmp_path / name, kv=KVOptions(at_rest=name)) as engine:
            engine.submit(ask(prompt, 1)).result()
            engine.wait_until_saved()
            n_bytes[name] = engine.store.memory.stats().n_bytes
            assert bool(engine.store.on_disk.lossy_bytes()) == (name != "exact")
            engine.call(engine.live.clear).result()
            again = engine.submit(ask(prompt, 1)).result()
            assert again.receipt.reused == {"memory": N_PROMPT - 1}
            live = engine.submit(ask([*prompt, *tokens_of(again.choices[0]), 7], 1)).result()
    assert again.receipt.lossy_tokens == live.receipt.lossy_tokens == LOSSY[codec]
    assert live.receipt.reused == {"live": N_PROMPT + 1}
    assert n_bytes["exact"] / n_bytes[codec] > SMALLER[codec]


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_in_4_bits_both_ends_of_a_conversation_stay_exact(model, tmp_path):
    """The last whole block is rounded once another one follows it."""
    prompt, kv = prompt_of(N_PROMPT), KVOptions(at_rest="q4")
    with engine_on(model, tmp_path, kv=kv) as engine:
        engine.submit(ask(prompt[:600], 1)).result()
        engine.wait_until_saved()
        assert rounded_in(tmp_path) == []  # 0 is the first, 1 the last
        engine.submit(ask(prompt, 1)).result()
        engine.wait_until_saved()
        assert rounded_in(tmp_path) == [1, 2]
        memory = engine.store.memory
        sizes = {one.number: one.n_bytes[Part.DELTA] for one in memory.walk() if one.number < 4}
        assert sizes[1] == sizes[2] < sizes[0] / 4 == sizes[3] / 4
    with engine_on(model, tmp_path, kv=kv) as engine:
        found = engine.submit(ask(prompt, 1)).result()
        assert found.receipt.reused == {"disk": N_PROMPT - 1}
        assert found.receipt.lossy_tokens == 512


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_what_follows_rounded_blocks_is_never_taken_for_exact(model, codec, tmp_path):
    """Neither from memory, nor from a live cache, nor by a fork or another agent; a request of the
    same kind finds them all."""
    prompt, kv = prompt_of(N_PROMPT), KVOptions(at_rest=codec)
    with engine_on(model, tmp_path, kv=kv) as engine:
        engine.submit(ask(prompt[:300], 1, exact=True)).result()
        said = engine.submit(ask(prompt, 1)).result()
    longer = [*prompt, *tokens_of(said.choices[0]), *prompt_of(600, seed=1)]
    with engine_on(model, tmp_path, kv=kv, audit_share=1.0) as engine:
        restored = engine.submit(ask(longer, 2, agent="a")).result()
        assert restored.receipt.cached_tokens == N_PROMPT + 1
        assert restored.receipt.lossy_tokens
        engine.wait_until_saved()
        engine.store.on_disk.agents.fork("a", "fork")
        for agent in ("fork", "b", None):
            exact = engine.submit(ask(longer, 2, exact=True, agent=agent, policy=READ)).result()
            assert exact.receipt.exact
            assert exact.receipt.cached_tokens <= 300  # those that were computed exactly
        again = engine.submit(ask(longer, 2, agent="fork")).result()
        assert again.receipt.cached_tokens == len(longer) - 1
        assert again.receipt.inexact == (codec,)
        assert again.receipt.lossy_tokens
        wait_until(lambda: not engine._scheduler.jobs)
        counters = engine.stats().counters
        assert (counters["drifts"], counters["audits"] > 0) == (0, True)
        assert counters["audit_nats"] < 0.05 * counters["audits"]
    with engine_on(model, tmp_path / "other") as engine:
        cold = engine.submit(ask(longer, 2)).result()
    assert apart(exact, cold) < 1e-4 < apart(restored, cold)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_bundle_carries_rounded_blocks_to_those_who_want_them(model, tmp_path):
    prompt, bundle = prompt_of(N_PROMPT), tmp_path / "a.bundle"
    with engine_on(model, tmp_path / "here", kv=Q8) as engine:
        engine.submit(ask(prompt, 2, agent="a")).result()
        engine.wait_until_saved()
        engine.store.on_disk.export_agent("a", bundle)
    with engine_on(model, tmp_path / "there", kv=Q8) as engine:
        on_disk = engine.store.on_disk
        ours = engine.lane_of().identity
        with pytest.raises(BadCacheFile, match="kv_options differ"):
            on_disk.import_agent(bundle, replace(ours, kv_options={}))
        on_disk.import_agent(bundle, ours)
        found = engine.submit(ask(prompt, 2, agent="a")).result()
        assert found.receipt.cached_tokens == N_PROMPT - 1
        assert set(found.receipt.inexact) == {"imported", "q8"}
