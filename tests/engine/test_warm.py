"""At start likely conversations are loaded from disk into memory; requests do not wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from keepwarm.cache.store import Budgets
from keepwarm.engine import warm
from keepwarm.engine.engine import Engine
from keepwarm.engine.warm import WarmedConversation, Warmer
from keepwarm.text.request import Breakpoint, KVOptions, Request, Sampling
from tests.kit.engines import Models, ask, engine_on, memory, tokens_of
from tests.kit.runs import prompt_of
from tests.kit.waiting import wait_until

N_PROMPT = 300
NAMES = ("ada", "bob", "eve")


def fill(models: Models, home: Path, names: Sequence[str] = NAMES, kind: str = "llama") -> dict:
    """A store in which these agents have spoken, in this order; their tokens by name."""
    said = {}
    with engine_on(models.of(kind), home) as engine:
        for seed, name in enumerate(names):
            prompt = prompt_of(N_PROMPT, seed)
            result = engine.submit(ask(prompt, agent=name)).result()
            said[name] = [*prompt, *tokens_of(result.choices[0])]
    return said


def goes_on(engine: Engine, tokens: Sequence[int]) -> dict[str, int]:
    """Tokens by tier when a conversation continues."""
    return dict(engine.submit(ask([*tokens, 5], 2)).result().receipt.reused)


def names_of(warmer: Warmer) -> list[str]:
    return [warmed.agent for warmed in warmer.warmed]


WORDS = "the quick brown fox jumps over the lazy dog while the other dog sleeps. " * 30


def with_words(question: str, *breakpoints: Breakpoint, seed: int = 0) -> Request:
    """A request without an agent about a text of some blocks."""
    messages = [
        {"role": "system", "content": f"{seed} {WORDS}"},
        {"role": "user", "content": question},
    ]
    return Request(
        messages=messages, sampling=Sampling(max_tokens=4, temperature=0), breakpoints=breakpoints
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_ttl_pin_is_warmed_too(models, tmp_path, kind):
    """No agent, only a breakpoint with a TTL."""
    with engine_on(models.of(kind), tmp_path) as engine:
        prepared = engine.prepare(with_words("Which dog?", Breakpoint(0, 3600)))
        engine.submit(prepared.request).result()
        ((place, _),) = prepared.breakpoints
    with engine_on(models.of(kind), tmp_path) as engine:
        (warmed,) = Warmer(engine).run()
        assert warmed.agent == ""
        assert warmed.n_tokens >= place
        again = engine.submit(with_words("Which fox?")).result()
        assert again.receipt.reused.keys() == {"live"}
        assert again.receipt.cached_tokens >= place


def test_expired_ttl_pins_are_not_warmed(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(with_words("Which dog?", Breakpoint(0, -1.0))).result()
        engine.submit(with_words("Which dog?", seed=1)).result()
    with engine_on(models.of("llama"), tmp_path) as engine:
        warmer = Warmer(engine)
        assert warmer.run() == []
        warmer.wait()  # for no thread


def test_places_that_are_held_come_before_who_is_not_pinned(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(with_words("Which dog?", Breakpoint(0, 3600))).result()
        engine.submit(ask(prompt_of(N_PROMPT), agent="ada")).result()
    with engine_on(models.of("llama"), tmp_path) as engine:
        assert [warmed.agent for warmed in Warmer(engine).run()] == ["", "ada"]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_after_a_restart_agents_are_live(models, tmp_path, kind):
    """A whole conversation, before any request, for every kind of layer. States alone are kept
    far apart, and the blocks between them say their tokens."""
    said = fill(models, tmp_path, ["ada"], kind)
    model = models.of(kind)
    with engine_on(model, tmp_path) as engine:
        warmer = Warmer(engine).run_in_background()
        warmer.wait()
        (warmed,) = warmer.warmed
        assert (warmed.agent, warmed.n_tokens) == ("ada", len(said["ada"]))
        assert engine.live.stats.n_bytes > 0
        assert engine.stats().counters["prefilled_tokens"] == 0
        assert goes_on(engine, said["ada"]) == {"live": len(said["ada"])}


def test_each_keys_conversations_are_warmed_under_its_key(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        for seed, tenant in enumerate(("", "k1", "k2")):
            prompt = prompt_of(N_PROMPT, seed)
            engine.submit(ask(prompt, agent=f"ada{seed}", tenant=tenant)).result()
    with engine_on(models.of("llama"), tmp_path) as engine:
        assert len(Warmer(engine).run()) == 3
        again = ask(prompt_of(N_PROMPT, 1), 2, tenant="k1")
        assert engine.submit(again).result().receipt.reused == {"live": N_PROMPT - 1}
        other = ask(prompt_of(N_PROMPT, 1), 2, tenant="k2")
        assert engine.submit(other).result().receipt.cached_tokens == 0


def test_the_pinned_first_then_those_used_last(models, tmp_path):
    fill(models, tmp_path)
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.store.on_disk.agents.update("ada", pinned=True)
        assert [warmed.agent for warmed in Warmer(engine).run()] == ["ada", "eve", "bob"]


def test_a_budget_holds(models, tmp_path):
    said = fill(models, tmp_path)
    with engine_on(models.of("llama"), tmp_path) as engine:
        size = Warmer(engine).run()[0].n_bytes
        engine.clear()
        warmer = Warmer(engine, 2 * size)
        warmer.run()
        assert names_of(warmer) == ["eve", "bob"]
        assert goes_on(engine, said["ada"]).keys() == {"disk"}
        assert goes_on(engine, said["bob"]).keys() == {"live"}


def test_nothing_live_gives_way(models, tmp_path):
    """What is asked now is worth more than what may be asked."""
    fill(models, tmp_path)
    with engine_on(models.of("llama"), tmp_path, memory=memory(live_bytes=1_000_000)) as engine:
        engine.submit(ask(prompt_of(N_PROMPT, 9))).result()
        engine.wait_until_saved()
        Warmer(engine, 1 << 30).run()
        assert engine.live.stats.evicted == 0
        assert engine.live.stats.entries == 1


def test_it_stands_back_while_requests_run(models, tmp_path):
    """Warming waits for running requests, then continues."""
    said = fill(models, tmp_path)
    with engine_on(models.of("llama"), tmp_path) as engine:
        answer = engine.submit(ask(prompt_of(20), 3500))
        wait_until(lambda: engine.stats().decoding)
        warmer = Warmer(engine).run_in_background()
        threading.Event().wait(0.2)
        assert engine.stats().decoding
        assert warmer.warmed == []
        answer.cancel()
        warmer.wait()
        assert len(warmer.warmed) == len(said)


def test_it_ends_when_it_is_closed(models, tmp_path):
    fill(models, tmp_path)
    with engine_on(models.of("llama"), tmp_path) as engine:
        answer = engine.submit(ask(prompt_of(20), 3500))
        wait_until(lambda: engine.stats().decoding)
        warmer = Warmer(engine).run_in_background()
        warmer.close()
        assert warmer.warmed == []
        answer.cancel()


def test_it_ends_with_its_engine(models, tmp_path, caplog):
    fill(models, tmp_path)
    with engine_on(models.of("llama"), tmp_path) as engine:
        warmer = Warmer(engine)
        engine.close()
        with caplog.at_level(logging.DEBUG, "keepwarm"):
            warmer.run_in_background().wait()
    assert warmer.warmed == []
    assert "warming stopped" in caplog.text
    said = [record for record in caplog.records if record.name == "keepwarm.engine.warm"]
    assert not [record for record in said if record.levelname != "DEBUG"]


def test_where_nothing_is_kept_nothing_is_warmed(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        assert Warmer(engine).run() == []
    with engine_on(models.of("llama"), tmp_path, budgets=Budgets(disk=False)) as engine:
        assert Warmer(engine).run() == []


def test_another_models_agents_are_left_alone(models, tmp_path):
    fill(models, tmp_path, ["ada"], "gemma3_text")
    with engine_on(models.of("llama"), tmp_path) as engine:
        assert Warmer(engine).run() == []


def test_what_is_torn_is_not_warmed(models, tmp_path):
    """Warmed as far as it is whole, and answered all the same."""
    said = fill(models, tmp_path, ["ada"])
    (whole, *_) = sorted((tmp_path / "store" / "blocks").rglob("*.safetensors"), key=_size)[::-1]
    torn = bytearray(whole.read_bytes())
    torn[-1] ^= 1
    whole.write_bytes(torn)
    with engine_on(models.of("llama"), tmp_path) as engine:
        Warmer(engine).run()
        result = engine.submit(ask([*said["ada"], 5], 2)).result()
        assert result.receipt.cached_tokens < len(said["ada"])


def _size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize(
    "kv",
    [
        KVOptions(kv_bits=8, kv_group_size=32),
        KVOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=100),
        KVOptions(max_kv_size=512),
    ],
)
def test_agents_with_other_options_than_the_engines_are_warmed(models, tmp_path, kv):
    """Also those that only a request named."""
    prompt = prompt_of(N_PROMPT)
    with engine_on(models.of("llama"), tmp_path) as engine:
        answer = engine.submit(ask(prompt, agent="small", kv=kv)).result().choices[0]
        engine.submit(ask(prompt_of(N_PROMPT, 1), agent="plain")).result()
    with engine_on(models.of("llama"), tmp_path) as engine:
        warmer = Warmer(engine)
        warmer.run()
        assert sorted(names_of(warmer)) == ["plain", "small"]
        again = engine.submit(ask([*prompt, *tokens_of(answer), 5], 2, kv=kv)).result().receipt
        assert again.reused == {"live": N_PROMPT + len(answer.tokens)}


class Gated(Warmer):
    """Is in the middle of a conversation until it may go on."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def run(self) -> list[WarmedConversation]:
        self.begun.set()
        self.go_on.wait()
        return []


def test_closing_waits_for_the_conversation_that_is_loaded(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        warmer = Gated(engine)
        warmer.run_in_background()
        warmer.begun.wait()
        closing = threading.Thread(target=warmer.close)
        closing.start()
        closing.join(0.3)
        assert closing.is_alive()
        warmer.go_on.set()
        closing.join()


@pytest.mark.parametrize("after_s", [0.0, 3600.0])
def test_the_vocabulary_is_read_some_time_after_the_start(models, tmp_path, monkeypatch, after_s):
    """Not at once: all threads wait meanwhile, and with them the first requests."""
    monkeypatch.setattr(warm, "VOCABULARY_AFTER_S", after_s)
    with engine_on(models.of("llama"), tmp_path) as engine:
        warmer = Warmer(engine).run_in_background()
        warmer.wait()
        if after_s:
            assert engine.preparer.load()  # it was not read
        else:
            wait_until(lambda: engine.preparer._grammars._vocabulary is not None)
        warmer.close()
