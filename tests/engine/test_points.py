"""Prompts without messages: where one parted from another, the next that parts there is warm."""

from __future__ import annotations

from typing import Any

import pytest

from keepwarm.engine.engine import Engine
from keepwarm.prefix.policy import Policy
from keepwarm.session.session import Session
from keepwarm.text.request import KVOptions, Result, Sampling
from tests.kit.engines import Exam, ask, engine_on, tokens_of
from tests.kit.models import LAYER_KINDS
from tests.kit.runs import prompt_of

EARLY = 191  # a state of qwen3_next is as large as 228 rows
PARTING = 391  # inside a block, and at no sparse point


def branch(number: int, n_tokens: int = 120, parting: int = PARTING) -> list[int]:
    """A prompt that shares its first tokens with all the others."""
    first = prompt_of(parting + 309)
    return first if not number else [*first[:parting], number, *prompt_of(n_tokens, seed=number)]


class Asked:
    """Branches that engines were asked, all compared with cold runs at the end."""

    def __init__(self, module) -> None:
        self._exam = Exam(module)

    def __call__(self, engine: Engine, number: int, parting: int = PARTING) -> Result:
        prompt = branch(number, parting=parting)
        result = engine.submit(ask(prompt, 4)).result()
        self._exam.add(prompt, result.choices[0])
        return result

    def check(self) -> None:
        self._exam.check()


def test_the_second_conversation_with_a_short_system_prompt_is_warm(models, tmp_path):
    """Prompts of some 800 tokens, where a state is as large as 228 rows; for a second system prompt
    too."""
    sentence = " answers in one sentence, with the words of the question. "
    with engine_on(models.of("qwen3_next"), tmp_path) as engine:
        for name in ("Alpha", "Beta"):
            receipts = []
            for question in ("What is a fox?", "How old is the dog?"):
                sampling = Sampling(max_tokens=4, temperature=0)
                with Session(engine, system=20 * (name + sentence), sampling=sampling) as session:
                    receipts.append(session.respond(question).receipt)
            first, second = receipts
            assert 700 < first.recomputed < 900
            assert second.recomputed < 40


@pytest.mark.parametrize("architecture", LAYER_KINDS)
def test_the_third_that_parts_at_a_place_recomputes_only_what_is_new(
    models, tmp_path, architecture
):
    """Rows are restored at any token; for states and windows the second prompt shows
    where they part, and keeps that place. Also where a state takes more bytes than the rows that
    it spares, and after a restart."""
    model, asked = models.of(architecture), Asked(models.module(architecture))
    with engine_on(model, tmp_path) as engine:
        for number in range(3):
            receipt = asked(engine, number, EARLY).receipt
        assert receipt.cached_tokens == EARLY
    with engine_on(model, tmp_path) as engine:
        receipt = asked(engine, 3, EARLY).receipt
        assert receipt.reused == {"disk": EARLY}
        assert receipt.recomputed == len(branch(3, parting=EARLY)) - EARLY
    asked.check()


@pytest.mark.parametrize("architecture", ["gemma3_text", "falcon_h1"])
def test_a_place_is_learned_over_restarts(models, tmp_path, architecture):
    """Each prompt comes to a process that has only the disk."""
    model, asked = models.of(architecture), Asked(models.module(architecture))
    for number in range(2):
        with engine_on(model, tmp_path) as engine:
            asked(engine, number)
    with engine_on(model, tmp_path) as engine:
        assert asked(engine, 2).receipt.reused == {"disk": PARTING}
    asked.check()


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", KVOptions(kv_bits=8, kv_group_size=32)),
        ("llama", KVOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=500)),
        ("qwen3", KVOptions(max_kv_size=300)),
        ("qwen3", KVOptions(max_kv_size=64)),
    ],
)
def test_a_place_is_learned_with_kv_options(models, tmp_path, architecture, options):
    """Compared with a cold run of the same options."""
    model, colds, warm = models.of(architecture), [], []
    for number in range(3):
        with engine_on(model, tmp_path, kv=options) as engine:
            request = ask(branch(number, 150), 4, policy=Policy.NO_STORE)
            colds.append(engine.submit(request).result())
            warm.append(engine.submit(ask(branch(number, 150), 4)).result())
    assert warm[2].receipt.reused == {"disk": PARTING}
    for cold, result in zip(colds, warm, strict=True):
        assert tokens_of(cold.choices[0]) == tokens_of(result.choices[0])


@pytest.mark.parametrize("architecture", ["mamba"])
def test_before_a_place_is_known_a_sparse_point_serves(models, tmp_path, architecture):
    """Where nothing ended. Of a hybrid only long prompts have them: its states are large."""
    model, first = models.of(architecture), prompt_of(1500)
    parted = [*first[:900], 1, *prompt_of(20, seed=1)]
    exam = Exam(models.module(architecture))
    with engine_on(model, tmp_path) as engine:
        engine.submit(ask(first, 4)).result()
    with engine_on(model, tmp_path) as engine:
        result = engine.submit(ask(parted, 4)).result()
    exam.add(parted, result.choices[0])
    exam.check()
    assert result.receipt.reused == {"disk": 768}


def test_a_window_is_kept_where_prompts_part_near_no_end(models, tmp_path):
    """The second prompt goes on for blocks after that place, and each comes to a process
    that has only the disk."""
    model, first = models.of("gpt_oss"), prompt_of(520)
    exam, receipts = Exam(models.module("gpt_oss")), []
    others = [[*first[:270], n, *prompt_of(n_more, seed=n)] for n, n_more in ((1, 250), (2, 9))]
    for prompt in (first, *others):
        with engine_on(model, tmp_path) as engine:
            result = engine.submit(ask(prompt, 4)).result()
        exam.add(prompt, result.choices[0])
        receipts.append(result.receipt)
    assert receipts[1].cached_tokens < 270  # nothing was kept there
    assert receipts[2].reused == {"disk": 270}
    exam.check()


def test_a_place_is_kept_though_others_part_around_it(models, tmp_path):
    """A window narrower than a block is in one that ends there. A longer block has it too,
    which is found only among the nearest few."""
    model, first = models.of("gpt_oss"), [*prompt_of(210), 120, *prompt_of(9)]
    first[200] = 110  # in the order of tokens the others are between it and the third
    others = [[*first[:200], 1, *prompt_of(20)]]
    others += [[*first[:210], i, *prompt_of(20, seed=i)] for i in range(6)]
    exam, third = Exam(models.module("gpt_oss")), [*first[:200], 100, *prompt_of(9, seed=9)]
    with engine_on(model, tmp_path) as engine:
        for prompt in (first, *others):
            engine.submit(ask(prompt, 1)).result()
        result = engine.submit(ask(third, 4)).result()
    exam.add(third, result.choices[0])
    assert result.receipt.cached_tokens == 200
    exam.check()


def test_a_prompt_is_known_after_a_restart_when_its_conversation_went_on(models, tmp_path):
    """Of states as large as 271 rows only some are kept; a short answer's end went for the prompt's
    (granitemoehybrid and nemotron_h computed such a prompt again)."""
    big: dict[str, Any] = {"mamba_d_state": 256}
    model, first = models.of("granitemoehybrid", **big), prompt_of(300)
    exam = Exam(models.module("granitemoehybrid", **big))
    with engine_on(model, tmp_path) as engine:
        said = engine.submit(ask(first, 5)).result().choices[0]
        turn = [*first, *tokens_of(said), *prompt_of(40, seed=1)]
        engine.submit(ask(turn, 5)).result()
    with engine_on(model, tmp_path) as engine:
        for prompt in (first, turn):
            result = engine.submit(ask(prompt, 5)).result()
            exam.add(prompt, result.choices[0])
            assert result.receipt.reused == {"disk": len(prompt) - 1}
    exam.check()
