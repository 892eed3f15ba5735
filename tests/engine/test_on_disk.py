"""What a request must leave on disk, whatever was known of its prompt before."""

import errno

import pytest

from keepwarm.cache.store import Budgets
from keepwarm.engine.engine import Engine
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import KVOptions, Request, Result
from tests.kit.engines import Exam, ask, engine_on, memory, tokens_of
from tests.kit.runs import prompt_of
from tests.store.kit import BrokenFiles

NO_LIVE = memory(live_bytes=0)


def two_turns(engine: Engine, first: Policy, second: Policy) -> tuple[list[int], Result]:
    """A conversation of two prompts; all its tokens, and how the second was answered."""
    prompt = prompt_of(700)
    said = tokens_of(engine.submit(ask(prompt, 5, policy=first)).result().choices[0])
    prompt = [*prompt, *said, *prompt_of(30, seed=1)]
    result = engine.submit(ask(prompt, 5, policy=second)).result()
    return [*prompt, *tokens_of(result.choices[0])], result


@pytest.mark.parametrize(
    ("architecture", "place", "policy"),
    [
        ("llama", "live", Policy.READ_WRITE),
        ("llama", "memory", Policy.DURABLE),
        ("gemma3_text", "memory", Policy.READ_WRITE),
        ("falcon_h1", "live", Policy.DURABLE),
        ("mamba", "memory", Policy.DURABLE),
    ],
)
def test_what_was_in_memory_alone_is_written_too(models, tmp_path, architecture, place, policy):
    """Design, policies: an earlier request was ephemeral, this one is not; nothing is left out."""
    model = models.of(architecture)
    budget = memory() if place == "live" else NO_LIVE
    with engine_on(model, tmp_path, memory=budget) as engine:
        tokens, result = two_turns(engine, Policy.EPHEMERAL, policy)
        assert result.receipt.reused.keys() == {place}
        assert result.receipt.durable is (True if policy is Policy.DURABLE else None)
    exam = Exam(models.module(architecture))
    with engine_on(model, tmp_path) as engine:
        again = engine.submit(ask([*tokens, 1], 2)).result()
        assert again.receipt.reused == {"disk": len(tokens)}
        exam.add([*tokens, 1], again.choices[0])
    exam.check()


def test_what_the_disk_has_lost_is_written_again(models, tmp_path):
    model = models.of("llama")
    with engine_on(model, tmp_path) as engine:
        prompt = prompt_of(700)
        engine.submit(ask(prompt, 4, policy=Policy.DURABLE)).result()
        disk = engine.store.on_disk.disk
        disk.delete_all([stored.key for stored in disk.walk()])
        result = engine.submit(ask(prompt, 4, policy=Policy.DURABLE)).result()
        assert (result.receipt.recomputed, result.receipt.durable) == (1, True)
    with engine_on(model, tmp_path) as engine:
        assert engine.submit(ask(prompt, 1)).result().receipt.reused == {"disk": 699}


@pytest.mark.parametrize("n_tokens", [256, 768])
def test_prompt_of_whole_blocks_is_warm_on_a_narrow_window(models, tmp_path, n_tokens):
    model, prompt = models.of("gemma3_text"), prompt_of(n_tokens)
    with engine_on(model, tmp_path, memory=NO_LIVE) as engine:
        engine.submit(ask(prompt, 2)).result()
        again = engine.submit(ask(prompt, 2)).result()
        assert again.receipt.reused == {"memory": n_tokens - 1}
    with engine_on(model, tmp_path) as engine:
        again = engine.submit(ask(prompt, 2)).result()
        assert again.receipt.reused == {"disk": n_tokens - 1}


def test_an_ephemeral_request_writes_nothing_of_what_it_found(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        two_turns(engine, Policy.EPHEMERAL, Policy.EPHEMERAL)
        engine.wait_until_saved()
        assert engine.store.tier_stats()["disk"].blocks == 0


@pytest.mark.parametrize(
    "budgets",
    [
        Budgets(disk_bytes=1, min_free_disk_bytes=0),
        Budgets(disk_writes_per_day=1, min_free_disk_bytes=0),
        Budgets(queue_bytes=1, min_free_disk_bytes=0),
        Budgets(disk=False),
    ],
    ids=["refused", "over budget", "dropped", "no disk"],
)
def test_a_durable_answer_says_when_it_is_not_safe(models, tmp_path, budgets):
    with engine_on(models.of("llama"), tmp_path, budgets=budgets) as engine:
        result = engine.submit(ask(prompt_of(300), 4, policy=Policy.DURABLE)).result()
        assert (len(tokens_of(result.choices[0])), result.receipt.durable) == (4, False)
        warmed = engine.warm(Request(prompt=prompt_of(300), policy=Policy.DURABLE)).result()
        assert warmed.receipt.durable is False
        assert engine.submit(ask(prompt_of(300), 4)).result().receipt.durable is None


def test_a_durable_answer_says_when_a_write_failed(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.store.on_disk.disk.records.files = files = BrokenFiles()
        files.break_(errno.ENOSPC, "write")
        request = ask(prompt_of(300), 4, policy=Policy.DURABLE)
        assert engine.submit(request).result().receipt.durable is False
        files.mend()
        assert engine.submit(request).result().receipt.durable is True


@pytest.mark.parametrize(
    "kv",
    [
        KVOptions(max_kv_size=280),
        KVOptions(kv_bits=8, kv_group_size=32),
        KVOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=320),  # the second turn is longer
    ],
)
def test_a_durable_answer_is_safe_however_it_is_held(models, tmp_path, kv):
    prompt = prompt_of(300)
    with engine_on(models.of("llama"), tmp_path) as engine:
        for turn in range(2):
            result = engine.submit(ask(prompt, 3, policy=Policy.DURABLE, kv=kv)).result()
            assert result.receipt.durable is True
            prompt = [*prompt, *tokens_of(result.choices[0]), *prompt_of(30, seed=turn)]


def test_a_durable_prompt_without_an_answer_is_safe_too(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        warmed = engine.warm(Request(prompt=prompt_of(300), policy=Policy.DURABLE)).result()
        assert warmed.receipt.durable is True
