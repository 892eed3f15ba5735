"""Whatever was warm, an answer is that of a cold run, and no token is computed twice.

Held against `tests.kit.compare`: greedy tokens equal up to a tie, logprobs within 1e-4. Tokens are
counted where the model is called.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from keepwarm.cache.store import Budgets
from keepwarm.engine.engine import Engine
from keepwarm.models.load import Model
from keepwarm.store.eviction import NEAR
from keepwarm.text.request import Receipt
from tests.kit.engines import Exam, Models, ask, engine_on, held, memory, tokens_of
from tests.kit.models import ARCHITECTURES, LAYER_KINDS
from tests.kit.runs import prompt_of

N = 5  # tokens an answer
# In a batch of another width its sums are taken in another order, and its gate sharpens that.
TOLERANCE = {"deepseek_v3": 1.7e-4, "deepseek_v32": 1.7e-4}


@dataclass
class Talk:
    """One conversation, every turn of it checked against a cold run and against the counter."""

    model: Model
    exam: Exam
    tokens: list[int] = field(default_factory=list)  # what has been said
    ends: list[int] = field(default_factory=list)  # of the turns
    places: set[int] = field(default_factory=set)  # where a state was kept
    first_places: set[int] = field(default_factory=set)  # those on the way all branches share

    def turn(self, engine: Engine, new: Sequence[int]) -> Receipt:
        """Send the whole conversation and something new; exactly the unknown tokens are fed."""
        prompt = [*self.tokens, *new]
        counter = self.model.module
        before = counter.fed
        result = engine.submit(ask(prompt, N)).result()
        self.exam.add(prompt, result.choices[0])
        receipt = result.receipt
        assert counter.fed - before == len(prompt) - receipt.cached_tokens + N
        assert receipt.recomputed == len(prompt) - receipt.cached_tokens
        self.tokens = [*prompt, *tokens_of(result.choices[0])]
        self.ends.append(len(self.tokens))
        self.places |= {len(prompt) - 1, len(self.tokens)}
        return receipt

    def kept_before(self, n_tokens: int) -> set[int]:
        return {place for place in self.first_places if place <= n_tokens}


@pytest.fixture
def talk_of(models: Models):
    def make(architecture: str) -> Talk:
        model = models.of(architecture)
        tolerance = TOLERANCE.get(architecture, 1e-4)
        return Talk(model, Exam(models.module(architecture), tolerance))

    return make


def fresh(turn: int, salt: int = 0) -> list[int]:
    """A user's turn: 1 to 16 tokens."""
    n_tokens = random.Random(1000 * salt + turn).randint(1, 16)
    return prompt_of(n_tokens, seed=100 * salt + turn)


# -- conversations --------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_turns_of_every_architecture_with_a_restart_in_the_middle(talk_of, tmp_path, architecture):
    """From turn 2 on only what is new is fed, also just after
    everything was closed and opened again."""
    talk = talk_of(architecture)
    for half in range(2):
        with engine_on(talk.model, tmp_path) as engine:
            for turn in range(4 * half, 4 * half + 4):
                n_known = len(talk.tokens)
                new = prompt_of(230) if turn == 0 else fresh(turn)
                receipt = talk.turn(engine, new)
                assert receipt.cached_tokens == n_known
                if turn:
                    place = "disk" if turn == 4 else "live"
                    assert receipt.reused == {place: n_known}
            assert engine.stats().counters["failed_saves"] == 0
    assert talk.exam.check() == 8 * N


@pytest.mark.parametrize("architecture", LAYER_KINDS)
def test_fork_rewind_and_edit(talk_of, tmp_path, architecture):
    """What a conversation shares with its past is known, and nothing else of it.

    Rows are known to the very token, windows too while they are there; states where a turn or a
    prompt ended, and large ones near the last of those.
    """
    talk = talk_of(architecture)
    with engine_on(talk.model, tmp_path) as engine:
        for turn in range(4):
            talk.turn(engine, prompt_of(250) if turn == 0 else fresh(turn))
        whole, ends = talk.tokens, list(talk.ends)
        talk.first_places = set(talk.places)
        for salt, n_common in enumerate((ends[2], ends[1], ends[2] + 1, ends[1] - 2, 128), 1):
            talk.tokens = whole[:n_common]
            parting = [(whole[n_common] + 1) % 128, *fresh(salt, salt)]
            receipt = talk.turn(engine, parting)
            kept = max({0, *talk.kept_before(n_common)})
            least, most = n_known(architecture, n_common, kept, ends[1])
            assert least <= receipt.cached_tokens <= most
    talk.exam.check()


def n_known(architecture: str, n_common: int, kept: int, last_kept: int) -> tuple[int, int]:
    """How much of a conversation is known that parts from its past after so many tokens: at least
    and at most. Of large states those near another one are deleted."""
    if architecture == "llama":  # restored at any token
        return n_common, n_common
    if architecture == "gemma3_text":  # at any token whose window is still there
        return (n_common, n_common) if kept else (0, 0)
    if architecture in ("mamba2", "falcon_h1"):  # where a turn or a prompt ended
        return kept, kept
    assert architecture == "qwen3_next"  # there too, but large: only the last are kept
    return (kept - NEAR if kept >= last_kept else 0), kept


@pytest.mark.parametrize("architecture", LAYER_KINDS[:4])
def test_with_next_to_no_room(talk_of, tmp_path, architecture):
    """Eviction in every tier costs tokens, never an answer."""
    talk = talk_of(architecture)
    budgets = Budgets(memory_bytes=60_000, disk_bytes=400_000, min_free_disk_bytes=0)
    with engine_on(talk.model, tmp_path, budgets=budgets, memory=memory(live_bytes=1)) as engine:
        for turn in range(9):
            talk.turn(engine, fresh(turn) if turn % 3 else prompt_of(250, seed=turn % 2))
            if turn % 3 == 2:
                talk.tokens = []
        stats = engine.stats()
        assert sum(tier.evicted + tier.refused for tier in stats.tiers.values()) > 0
        assert stats.counters["failed"] == 0
    talk.exam.check()


# -- neighbours -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", LAYER_KINDS[:4])
def test_neighbours_that_join_and_leave(models, tmp_path, architecture):
    """Conversations of unlike lengths, side by side, each answered as if it were alone."""
    model = models.of(architecture)
    exam = Exam(models.module(architecture))
    talks = [prompt_of(20 + 17 * i, seed=i) for i in range(5)]
    with engine_on(model, tmp_path) as engine:
        for turn in range(3):
            fed = model.module.fed
            n_known = 0
            with held(engine):
                answers = [engine.submit(ask(talk, 3 + 2 * i)) for i, talk in enumerate(talks)]
            for i, answer in enumerate(answers):
                result = answer.result()
                exam.add(talks[i], result.choices[0])
                n_known += result.receipt.cached_tokens
                assert turn == 0 or result.receipt.cached_tokens == len(talks[i]) - 4
                talks[i] = [*talks[i], *tokens_of(result.choices[0]), *prompt_of(4, seed=turn)]
            n_asked = sum(len(talk) - 4 for talk in talks)  # prompts and answers
            assert model.module.fed - fed == n_asked - n_known
    exam.check()


# -- other caches ---------------------------------------------------------------------------------
