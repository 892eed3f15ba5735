"""Blocks that are rounded on disk: restored, told of, and never taken for exact ones."""

import json
from dataclasses import replace

import pytest

from keepwarm.errors import BadCacheFile
from keepwarm.models.load import Model
from keepwarm.text.request import KVOptions
from tests.kit.engines import ask, engine_on, tokens_of
from tests.kit.runs import prompt_of
from tests.kit.waiting import wait_until

Q8 = KVOptions(at_rest="q8")
WIDE = {"llama": {}, "gemma3_text": {"head_dim": 64}, "falcon_h1": {"head_dim": 64}}
N_PROMPT = 600


@pytest.fixture(scope="module", params=WIDE)
def model(request, models) -> Model:
    return models.of(request.param, **WIDE[request.param])


def extras_in(store) -> list[dict]:
    """The `extra` of every record of rows on disk."""
    found = []
    for path in store.rglob("*.d.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found.append(json.loads(header["__metadata__"]["keepwarm"])["extra"])
    return found


def apart(one, other) -> float:
    """The largest difference of a logprob of the first token that both answers show."""
    a, b = (
        {top.token: top.logprob for top in given.choices[0].tokens[0].top} for given in (one, other)
    )
    return max(abs(a[token] - b[token]) for token in a.keys() & b.keys())


def test_a_prompt_is_restored_from_8_bits(model, tmp_path):
    prompt = prompt_of(N_PROMPT)
    with engine_on(model, tmp_path) as engine:
        computed = engine.submit(ask(prompt, 4, kv=Q8)).result()
        assert computed.receipt.exact
    rounded = [extra for extra in extras_in(tmp_path) if extra]
    assert rounded == 2 * [{"codec": "q8", "axis": "token"}]  # not the open block
    with engine_on(model, tmp_path) as engine:
        found = engine.submit(ask(prompt, 4, kv=Q8)).result()
        cold = engine.submit(ask(prompt, 4)).result()
    assert found.receipt.cached_tokens == N_PROMPT - 1
    assert found.receipt.inexact == ("q8",)
    assert 0 < apart(found, cold) < 0.3  # rows were rounded, and hardly


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_what_follows_rounded_blocks_is_never_taken_for_exact(model, tmp_path):
    """Neither from memory nor from a live cache; a request of the same kind finds them all."""
    prompt = prompt_of(N_PROMPT)
    with engine_on(model, tmp_path, kv=Q8) as engine:
        engine.submit(ask(prompt[:300], 1, exact=True)).result()
        said = engine.submit(ask(prompt, 1)).result()
    longer = [*prompt, *tokens_of(said.choices[0]), *prompt_of(N_PROMPT, seed=1)]
    with engine_on(model, tmp_path, kv=Q8, audit_share=1.0) as engine:
        restored = engine.submit(ask(longer, 2, agent="a")).result()
        assert restored.receipt.cached_tokens == N_PROMPT + 1
        exact = engine.submit(ask(longer, 2, exact=True, agent="b")).result()
        assert exact.receipt.exact
        assert exact.receipt.cached_tokens <= 300  # those that were computed exactly
        again = engine.submit(ask(longer, 2)).result()  # from memory
        assert again.receipt.cached_tokens == len(longer) - 1
        assert again.receipt.inexact == ("q8",)
        wait_until(lambda: not engine._scheduler.jobs)
        assert engine.stats().counters["audits"] <= 1  # of the exact one
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
