"""A conversation's open block is kept until a longer one serves as well, and no longer."""

import pytest

from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.agents import MAX_SIDES
from keepwarm.agents.reachability import MAX_UNCHECKED_LEFT
from keepwarm.cache.restore.writing import Writer
from keepwarm.prefix.blocks import chain
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Part
from keepwarm.store.disk.disk import DiskLimits
from keepwarm.store.memory import MemoryTier
from tests.agents.test_agents import IDENTITY, LIMITS, NAME, holds_tokens
from tests.contract.test_tiers import Minutes
from tests.store.kit import record, tokens_of

MIB = 1 << 20


@pytest.fixture
def disk_store(tmp_path):
    with AgentStore(tmp_path / "store", DiskLimits(min_free_bytes=0)) as opened:
        opened.register(IDENTITY)
        yield opened


def save(disk_store, tokens, parts=(Part.DELTA,), memory=None, name=NAME, n_bytes=1024):
    """Keep a conversation as a request does: through the writer, its open block included."""
    writer = Writer(memory, disk_store.disk, 64 * MIB)
    for ref in chain(name, tokens):
        for part in parts:
            made = record(ref, part, n_bytes=n_bytes, namespace=name)
            writer.put(made, Policy.READ_WRITE)
    writer.close()


def lengths(tier):
    return sorted(stored.n_tokens for stored in tier.walk())


@pytest.mark.parametrize("parts", [(Part.DELTA,), (Part.DELTA, Part.WINDOW)])
def test_a_growing_conversation_leaves_no_tails_behind(parts, disk_store):
    tokens = tokens_of(700)
    memory = MemoryTier(64 * MIB)
    for n in (100, 200, 300, 700):
        save(disk_store, tokens[:n], parts, memory)
    assert lengths(disk_store.disk) == lengths(memory) == [188, 256, 256]


def test_a_tail_with_a_state_stays(disk_store):
    """A checkpoint inside a block is no prefix of a later one: it can be restored only there."""
    tokens = tokens_of(256)
    save(disk_store, tokens[:100], (Part.DELTA, Part.STATE))
    save(disk_store, tokens)
    assert lengths(disk_store.disk) == [100, 256]


def test_a_tail_stays_while_the_longer_block_lacks_its_window_rows(disk_store):
    tokens = tokens_of(256)
    save(disk_store, tokens[:100], (Part.DELTA, Part.WINDOW))
    save(disk_store, tokens, (Part.DELTA,))
    assert lengths(disk_store.disk) == [100, 256]
    save(disk_store, tokens, (Part.WINDOW,))
    assert lengths(disk_store.disk) == [256]


def test_a_pinned_or_unrelated_tail_stays(disk_store):
    tokens = tokens_of(256)
    save(disk_store, tokens[:100])
    (pinned,) = [ref.key for ref in chain(NAME, tokens[:100])]
    disk_store.disk.pin(pinned, "somebody")
    save(disk_store, [*tokens[:50], *tokens_of(60, seed=8)])
    save(disk_store, tokens)
    assert lengths(disk_store.disk) == [100, 110, 256]


def test_an_agent_whose_tail_was_outgrown_loses_nothing(disk_store, tmp_path):
    tokens = tokens_of(600)
    save(disk_store, tokens[:300])
    disk_store.agents.advance("old", NAME, tokens[:300])
    save(disk_store, tokens)
    assert lengths(disk_store.disk) == [88, 256, 256]
    assert disk_store.tokens_of(disk_store.agents.show("old")) == tokens[:300]
    disk_store.export_agent("old", tmp_path / "old.kw")
    with AgentStore(tmp_path / "other", LIMITS) as other:
        made = other.import_agent(tmp_path / "old.kw", IDENTITY)
        assert (made.n_tokens, other.tokens_of(made)) == (300, tokens[:300])


@pytest.mark.parametrize("secret", [None, "a passphrase"])
@pytest.mark.parametrize("n_shared", [0, 256])
def test_deleting_takes_what_has_outgrown_the_tail(n_shared, secret, tmp_path):
    """Whoever asked for the longer prompt: the agent's tokens are in it."""
    shared, mine = tokens_of(n_shared), tokens_of(100, seed=1)
    with AgentStore(tmp_path / "store", LIMITS, secret=secret) as disk_store:
        name = disk_store.register(IDENTITY)
        disk_store.agents.advance("other", name, shared)
        save(disk_store, shared + mine, name=name)
        agent = disk_store.agents.advance("mine", name, shared + mine)
        longer = [shared + mine + tokens_of(n, seed=n) for n in (30, 400)]
        for tokens in longer:
            save(disk_store, tokens, name=name)
        assert not disk_store.disk.have(agent.blocks[-1:])
        disk_store.agents.delete("mine")
        assert lengths(disk_store.disk) == [256] * (n_shared // 256)
        if secret is None:
            assert not holds_tokens(disk_store.disk.root, mine)


def test_deleting_takes_what_goes_on_from_a_tail_that_is_still_there(disk_store):
    mine = tokens_of(100)
    save(disk_store, mine)
    disk_store.agents.advance("mine", NAME, mine)
    disk_store.agents.update("mine", pinned=True)
    save(disk_store, tokens_of(300))
    assert lengths(disk_store.disk) == [44, 100, 256]
    disk_store.agents.delete("mine")
    assert not holds_tokens(disk_store.disk.root, mine)


def test_deleting_takes_what_outgrew_a_tail_that_was_rewound(disk_store):
    tokens = tokens_of(400)
    for n in (100, 200):
        save(disk_store, tokens[:n])
        disk_store.agents.advance("mine", NAME, tokens[:n])
    disk_store.agents.rewind("mine", 1)
    save(disk_store, tokens)
    save(disk_store, tokens[:100] + tokens_of(300, seed=1))
    disk_store.agents.delete("mine")
    assert not holds_tokens(disk_store.disk.root, tokens[:200])


def test_deleting_spares_what_stands_in_for_the_tail_of_another(disk_store):
    """A fork went on from the agent's tail; when it goes, the agent has all it had."""
    tokens = tokens_of(400)
    save(disk_store, tokens[:300])
    disk_store.agents.advance("first", NAME, tokens[:300])
    disk_store.agents.fork("first", "fork")
    save(disk_store, tokens)
    disk_store.agents.advance("fork", NAME, tokens)
    assert lengths(disk_store.disk) == [144, 256]
    disk_store.agents.delete("fork")
    assert disk_store.tokens_of(disk_store.agents.show("first")) == tokens[:300]


def test_deleting_spares_a_checkpoint_inside_what_another_has(disk_store):
    tokens = tokens_of(256)
    save(disk_store, tokens[:100], (Part.DELTA, Part.STATE))
    save(disk_store, tokens)
    disk_store.agents.advance("first", NAME, tokens)
    disk_store.agents.fork("first", "fork")
    disk_store.agents.delete("fork")
    assert lengths(disk_store.disk) == [100, 256]
    disk_store.agents.delete("first")
    assert lengths(disk_store.disk) == []


def test_what_an_agent_has_left_is_known_however_often_it_is_outgrown(disk_store):
    pasts = [tokens_of(60, seed=seed) for seed in range(MAX_UNCHECKED_LEFT + MAX_SIDES + 2)]
    for tokens in pasts:
        save(disk_store, tokens[:20])
        agent = disk_store.agents.advance("mine", NAME, tokens[:20])
    for n in (40, 60):
        for tokens in pasts:
            save(disk_store, tokens[:n])
        agent = disk_store.agents.advance("mine", NAME, pasts[0][:20])
        assert len(agent.left) > MAX_UNCHECKED_LEFT
    disk_store.agents.delete("mine")
    assert lengths(disk_store.disk) == []


def test_a_pin_holds_an_agent_whose_tail_was_outgrown(tmp_path):
    limits = DiskLimits(max_bytes=3 * MIB, min_free_bytes=0)
    with AgentStore(tmp_path / "store", limits) as disk_store:
        disk_store.disk._clock = Minutes()
        tokens = tokens_of(700)
        save(disk_store, tokens[:600], n_bytes=100_000)
        disk_store.agents.advance("kept", NAME, tokens[:600])
        save(disk_store, tokens, n_bytes=100_000)
        disk_store.agents.update("kept", pinned=True)
        for seed in range(10, 40):
            save(disk_store, tokens_of(512, seed=seed), n_bytes=100_000)
        assert disk_store.tokens_of(disk_store.agents.show("kept")) == tokens[:600]
