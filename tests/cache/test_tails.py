"""A conversation's open block is kept until a longer one serves as well, and no longer."""

import pytest

from keepwarm.cache.io import Writer
from keepwarm.cache.policy import Policy
from keepwarm.cache.shelf import Shelf
from keepwarm.prefix.blocks import chain
from keepwarm.store.disk import DiskLimits
from keepwarm.store.memory import MemoryTier
from keepwarm.store.record import Part
from tests.cache.test_agents import IDENTITY, LIMITS, NAME
from tests.store.kit import record, tokens_of

MIB = 1 << 20


@pytest.fixture
def shelf(tmp_path):
    with Shelf(tmp_path / "store", DiskLimits(min_free_bytes=0)) as opened:
        opened.register(IDENTITY)
        yield opened


def save(shelf, tokens, parts=(Part.DELTA,), memory=None):
    """Keep a conversation as a request does: through the writer, its open block included."""
    writer = Writer(memory, shelf.disk, 64 * MIB)
    for ref in chain(NAME, tokens):
        for part in parts:
            writer.put(record(ref, part, namespace=NAME), Policy.READ_WRITE)
    writer.close()


def lengths(tier):
    return sorted(stored.n_tokens for stored in tier.walk())


@pytest.mark.parametrize("parts", [(Part.DELTA,), (Part.DELTA, Part.WINDOW)])
def test_a_growing_conversation_leaves_no_tails_behind(parts, shelf):
    tokens = tokens_of(700)
    memory = MemoryTier(64 * MIB)
    for n in (100, 200, 300, 700):
        save(shelf, tokens[:n], parts, memory)
    assert lengths(shelf.disk) == lengths(memory) == [188, 256, 256]


def test_a_tail_with_a_state_stays(shelf):
    """A checkpoint inside a block is no prefix of a later one: it can be restored only there."""
    tokens = tokens_of(256)
    save(shelf, tokens[:100], (Part.DELTA, Part.STATE))
    save(shelf, tokens)
    assert lengths(shelf.disk) == [100, 256]


def test_a_tail_stays_while_the_longer_block_lacks_its_window_rows(shelf):
    tokens = tokens_of(256)
    save(shelf, tokens[:100], (Part.DELTA, Part.WINDOW))
    save(shelf, tokens, (Part.DELTA,))
    assert lengths(shelf.disk) == [100, 256]
    save(shelf, tokens, (Part.WINDOW,))
    assert lengths(shelf.disk) == [256]


def test_a_pinned_or_unrelated_tail_stays(shelf):
    tokens = tokens_of(256)
    save(shelf, tokens[:100])
    (pinned,) = [ref.key for ref in chain(NAME, tokens[:100])]
    shelf.disk.pin(pinned, "somebody")
    save(shelf, [*tokens[:50], *tokens_of(60, seed=8)])
    save(shelf, tokens)
    assert lengths(shelf.disk) == [100, 110, 256]


def test_an_agent_whose_tail_was_outgrown_loses_nothing(shelf, tmp_path):
    tokens = tokens_of(600)
    save(shelf, tokens[:300])
    shelf.agents.advance("old", NAME, tokens[:300])
    save(shelf, tokens)
    assert lengths(shelf.disk) == [88, 256, 256]
    assert shelf.tokens_of(shelf.agents.show("old")) == tokens[:300]
    shelf.export_agent("old", tmp_path / "old.kw")
    with Shelf(tmp_path / "other", LIMITS) as other:
        made = other.import_agent(tmp_path / "old.kw", IDENTITY)
        assert (made.n_tokens, other.tokens_of(made)) == (300, tokens[:300])
