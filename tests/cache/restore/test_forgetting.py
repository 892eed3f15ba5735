"""What a process forgets of its memory when blocks are deleted."""

import pytest

from keepwarm.cache.restore.forgetting import Deletions, KeptTokens
from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace, chain, pack
from keepwarm.store.index.forgotten import Forgotten
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import NamedBlock
from tests.store.kit import record, tokens_of

NAME = Namespace(b"n" * 32)
WORDS = tokens_of(BLOCK_TOKENS + 100)


@pytest.fixture
def memory():
    tier = MemoryTier(1 << 20)
    yield tier
    tier.close()


def blocks_of(tokens):
    return [NamedBlock(ref.key, ref.parent, ref.n_tokens) for ref in chain(NAME, tokens)]


def keep(tier, tokens):
    """Put the last block of these tokens; its key."""
    *_, end = chain(NAME, tokens)
    tier.put(record(end, namespace=NAME))
    return end.key


def forget(tier, tokens):
    """The last block; those before it are used by others too."""
    blocks = tuple(blocks_of(tokens)[-1:])
    Deletions([Forgotten("agent:ada", blocks)], str).delete_from(tier)


def test_shorter_copies_go_also_where_the_block_itself_was_evicted(memory):
    """Its tokens are unknown then, so everything that may be a copy goes."""
    short, other = keep(memory, WORDS[:-10]), keep(memory, tokens_of(50, seed=1))
    forget(memory, WORDS)
    assert memory.have([short, other]).keys() == {other}


def test_what_differs_stays_where_they_can_be_compared(memory):
    whole, short = keep(memory, WORDS), keep(memory, WORDS[:-10])
    other = keep(memory, [*WORDS[:BLOCK_TOKENS], *tokens_of(20, seed=1)])
    longer = keep(memory, [*WORDS, *tokens_of(20, seed=2)])
    forget(memory, WORDS)
    assert memory.have([whole, short, other, longer]).keys() == {other}


def test_where_it_is_unknown_what_was_deleted_everything_goes(memory):
    """As when more was deleted than the index lists."""
    keep(memory, WORDS)
    everything = Deletions(None, str)
    everything.delete_from(memory)
    assert list(memory.walk()) == []
    assert everything.include("ada")
    assert everything.first_in(KeptTokens("bob", NAME, pack(WORDS))) == 0


def test_tokens_are_forgotten_by_their_agent_and_by_their_blocks():
    deleted = Deletions([Forgotten("agent:ada", tuple(blocks_of(WORDS)[1:]))], str)
    assert deleted.include("ada")
    assert not deleted.include("bob")
    assert deleted.first_in(KeptTokens("ada", NAME, pack(tokens_of(50)))) == 0
    assert deleted.first_in(KeptTokens("bob", NAME, pack(WORDS))) == 1
    assert deleted.first_in(KeptTokens("bob", NAME, pack(WORDS[:BLOCK_TOKENS]))) is None
