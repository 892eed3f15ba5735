"""What a store holds after a prompt, whatever the tier and wherever blocks begin."""

import random

import pytest

from keepwarm.engine.preparation import stored_continuations
from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace, chain
from keepwarm.records.record import Part
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.marker import unlock
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers
from tests.store.kit import NAMESPACE, record, tokens_of

PROMPT = tokens_of(300)
ANSWER = tokens_of(400, seed=1)


@pytest.fixture(params=["memory", "disk", "sealed"])
def tier(request, tmp_path):
    cipher = unlock(tmp_path / "store", "a passphrase") if request.param == "sealed" else None
    limits = DiskLimits(min_free_bytes=0)
    disk = request.param != "memory"
    made = DiskTier(tmp_path / "store", limits, cipher=cipher) if disk else MemoryTier(1 << 28)
    yield made
    made.close()


def put(tier, tokens, part=Part.DELTA):
    for ref in chain(NAMESPACE, tokens):
        tier.put(record(ref, part, n_bytes=16))


def follow(tier, tokens, *guesses, namespace=NAMESPACE):
    return list(stored_continuations(namespace, Tiers([("tier", tier)]), tokens, guesses or [[]]))


def test_what_follows_a_prompt_to_the_end_of_its_block(tier):
    put(tier, PROMPT + ANSWER)
    to_the_end = -len(PROMPT) % BLOCK_TOKENS
    assert follow(tier, PROMPT, [7]) == [ANSWER[:to_the_end]]
    assert follow(tier, PROMPT) == [ANSWER[:to_the_end]]
    so_far = PROMPT + ANSWER[:to_the_end]
    assert follow(tier, so_far, [7], ANSWER[to_the_end:][:1]) == [ANSWER[to_the_end:]]
    assert follow(tier, so_far, [7]) == []  # a new block, and nothing like it


def test_the_likest_comes_first(tier):
    others = [tokens_of(40, seed) for seed in range(2, 30)]
    for answer in others:
        put(tier, PROMPT + answer)
    for answer in others:
        guess = [*answer[:20], 1, 2, 3]
        assert follow(tier, PROMPT, guess)[0] == answer


def test_nothing_follows_what_is_not_stored(tier):
    put(tier, PROMPT + ANSWER)
    assert follow(tier, [*PROMPT[:-1], 5], ANSWER) == []
    assert follow(tier, [5, *PROMPT[1:]], ANSWER) == []
    assert follow(tier, PROMPT + ANSWER, ANSWER) == []
    assert follow(tier, PROMPT, ANSWER, namespace=Namespace(bytes(32))) == []


@pytest.mark.parametrize("part", Part)
def test_every_kind_of_record_tells_its_tokens(tier, part):
    put(tier, PROMPT + ANSWER, part)
    assert follow(tier, PROMPT, [7]) == [ANSWER[: -len(PROMPT) % BLOCK_TOKENS]]


def test_a_block_that_is_gone_meanwhile_is_left_out(tier):
    put(tier, PROMPT + ANSWER)
    *_, last = chain(NAMESPACE, (PROMPT + ANSWER)[: 2 * BLOCK_TOKENS])
    tier.delete_all([last.key])
    assert follow(tier, PROMPT, [7]) == []


def test_any_place_in_a_conversation_can_be_gone_on_from(tier):
    conversation = tokens_of(3 * BLOCK_TOKENS - 9)
    put(tier, conversation)
    pick = random.Random(3)
    for at in (1, BLOCK_TOKENS, 2 * BLOCK_TOKENS, *pick.sample(range(1, len(conversation)), 9)):
        (found,) = follow(tier, conversation[:at], conversation[at : at + 4])
        assert found == conversation[at : at // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS]
