"""Side requests do not overwrite: an agent has branches, and a rule says which is its head."""

import json
from dataclasses import replace

import pytest

from keepwarm.agents.agent import TOOL_WAIT_S
from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.agents import MAX_SIDES
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import chain
from keepwarm.prefix.fingerprint import namespace
from keepwarm.store.disk.disk import DiskLimits
from tests.agents.test_agents import IDENTITY, LIMITS, NAME, holds_tokens, keep
from tests.contract.test_tiers import Minutes
from tests.store.kit import tokens_of

SYSTEM = tokens_of(900, seed=1)  # of a coding agent: system prompt and tools
TITLE = tokens_of(40, seed=2)


@pytest.fixture
def disk_store(tmp_path):
    with AgentStore(tmp_path / "store", LIMITS) as opened:
        opened.register(IDENTITY)
        opened.agents._clock = Minutes()
        yield opened


@pytest.fixture
def ask(disk_store):
    def ask(prompt, n_answer=20, called=False, name=NAME, agent="a"):
        """A turn: the prompt with its answer, which depends on the prompt."""
        tokens = [*prompt, *tokens_of(n_answer, seed=100 + len(prompt))]
        keep(disk_store, tokens)
        disk_store.agents.advance(agent, name, tokens, len(prompt), called=called)
        return tokens

    return ask


def said(n, n_tokens=30):
    return tokens_of(n_tokens, seed=10 + n)


def head_tokens(disk_store):
    return disk_store.tokens_of(disk_store.agents.show("a"))


def test_three_unrelated_chats_have_turns_of_their_own(disk_store, ask):
    """Before, the second took over the turns of the first."""
    chats = [ask(said(n), 5) for n in range(3)]
    agent = disk_store.agents.show("a")
    assert [branch.turns for branch in agent.branches] == [(35,)] * 3
    assert {disk_store.tokens_of(agent.on(n))[0] for n in (1, 2, 3)} == {c[0] for c in chats}


def test_a_title_request_is_beside_the_head(disk_store, ask):
    """A pinned conversation stays what it is, and so do its pins."""
    first = ask([*SYSTEM, *said(1)])
    pinned = disk_store.agents.update("a", pinned=True).blocks[-1]
    ask(TITLE)
    agent = disk_store.agents.show("a")
    assert (head_tokens(disk_store), agent.turns) == (first, (len(first),))
    assert disk_store.disk.index.lookups.owners(pinned) == ["agent:a"]
    second = ask([*first, *said(2)])
    assert disk_store.agents.show("a").turns == (len(first), len(second))
    ask([*TITLE[:35], *said(3)])  # a title again: its prompts differ before they end
    assert head_tokens(disk_store) == second


@pytest.mark.parametrize("n_shared", [0, 40])
def test_a_title_request_that_comes_first_gives_way(n_shared, disk_store, ask):
    """Client and template may begin both prompts alike."""
    ask([*SYSTEM[:n_shared], *TITLE])
    first = ask([*SYSTEM, *said(1)])
    assert head_tokens(disk_store) == first
    ask([*SYSTEM[:n_shared], *TITLE])  # sent again: no conversation either
    assert head_tokens(disk_store) == first


def test_a_title_request_longer_than_a_short_chat_gives_way_with_the_next_turn(disk_store, ask):
    first = ask(said(1))
    ask([*tokens_of(300, seed=3), *first])
    second = ask([*first, *said(2)])
    assert head_tokens(disk_store) == second
    assert disk_store.agents.show("a").turns == (len(first), len(second))


def test_a_clients_compaction_becomes_the_head(disk_store, ask):
    """System prompt and tools as before, a summary in place of the conversation."""
    long = ask([*SYSTEM, *said(1)])
    for n in range(2, 9):
        long = ask([*long, *said(n, 200)])
    compacted = ask([*SYSTEM, *tokens_of(100, seed=4)])
    agent = disk_store.agents.show("a")
    assert head_tokens(disk_store) == compacted
    assert agent.turns == (len(compacted),)
    assert disk_store.tokens_of(agent.on(1)) == long


def test_a_compaction_without_a_system_prompt_becomes_it_with_the_next_turn(disk_store, ask):
    old = ask([*ask(said(1, 300)), *said(2)])
    compacted = ask(tokens_of(200, seed=4))
    assert head_tokens(disk_store) == old
    second = ask([*compacted, *said(3)])
    assert head_tokens(disk_store) == second


def test_an_edited_conversation_becomes_the_head_with_the_turns_it_still_has(disk_store, ask):
    """In the middle of a block, and after a turn that ended in the same block."""
    first = ask([*SYSTEM[:100], *said(1)])
    second = ask([*first, *said(2)])
    edited = ask([*first, *said(3)])
    agent = disk_store.agents.show("a")
    assert agent.turns == (len(first), len(edited))
    assert disk_store.tokens_of(agent) == edited
    assert disk_store.tokens_of(agent.on(1)) == second
    again = ask([*second, *said(4)])  # and back
    assert disk_store.agents.show("a").turns == (len(first), len(second), len(again))


def test_a_conversation_that_was_rewound_by_its_client_becomes_the_head(disk_store, ask):
    first = ask([*SYSTEM, *said(1)])
    ask([*ask([*first, *said(2)]), *said(3)])
    assert ask([*SYSTEM, *said(1)]) == first
    assert disk_store.agents.show("a").turns == (len(first),)


def test_an_edit_is_found_where_blocks_are_gone(disk_store, ask):
    """By the keys of turn ends: the tokens cannot be read any more."""
    first = ask([*SYSTEM[:100], *said(1)])
    ask([*first, *said(2)])
    disk_store.disk.delete_all([stored.key for stored in disk_store.disk.walk()])
    edited = ask([*first, *said(3)])
    assert disk_store.agents.show("a").turns == (len(first), len(edited))


def test_an_answer_that_is_rendered_anew_is_the_same_branch(disk_store, ask):
    """As templates do that leave out earlier thoughts; a retry with another answer too."""
    first = ask([*SYSTEM, *said(1)])
    n_prompt = len(first) - 20
    anew = ask([*first[:n_prompt], *said(5, 7), *said(2)])
    agent = disk_store.agents.show("a")
    assert (disk_store.tokens_of(agent), agent.sides) == (anew, ())
    assert agent.turns == (len(anew),), "no turn ends where its tokens are not"
    disk_store.agents.delete("a")
    assert not holds_tokens(disk_store.disk.root, first)


def test_tokens_are_compared_not_blocks(disk_store, ask):
    """One token differs, in a block that is otherwise the same."""
    first = ask(SYSTEM[:200])
    other = [*first, *said(2)]
    other[150] += 1
    ask(other)
    agent = disk_store.agents.show("a")
    assert sorted(branch.n_tokens for branch in agent.branches) == [220, 270]
    assert all(len(branch.turns) == 1 for branch in agent.branches)


def test_a_tools_conversation_does_not_become_the_head_meanwhile(disk_store, ask):
    """A subagent under the same session id; afterwards the conversation goes on."""
    first = ask([*SYSTEM, *said(1)], called=True)
    work = ask(tokens_of(400, seed=7))
    for n in range(3):
        work = ask([*work, *said(n)])
    assert head_tokens(disk_store) == first
    second = ask([*first, *said(2)])
    assert head_tokens(disk_store) == second


def test_nobody_waits_for_a_tool_for_ever(disk_store, ask):
    ask([*SYSTEM, *said(1)], called=True)
    other = ask(tokens_of(400, seed=7))
    disk_store.agents._clock = lambda: 2 * TOOL_WAIT_S
    other = ask([*other, *said(2)])
    assert head_tokens(disk_store) == other


def test_another_model_goes_on_with_the_conversation(disk_store, ask):
    """Its tokens cannot be compared; a title request of a small model stays beside it."""
    name = namespace(replace(IDENTITY, config="9"))
    first = ask([*SYSTEM, *said(1)])
    ask(TITLE, name=name)
    assert head_tokens(disk_store) == first
    ask([*SYSTEM, *said(1), *said(2)], name=name)
    assert disk_store.agents.show("a").namespace == name


def test_side_branches_age_out(disk_store, ask):
    """The least recently used; what they had goes with the agent, a pinned one stays."""
    first = ask([*SYSTEM, *said(1)])
    kept, dropped = ask(tokens_of(50, seed=8)), ask(tokens_of(50, seed=9))
    disk_store.agents.pin("a", branch=2)
    for n in range(MAX_SIDES + 3):
        ask(tokens_of(50, seed=20 + n))
    agent = disk_store.agents.show("a")
    numbers = [branch.number for branch in agent.sides]
    assert (len(numbers), 2 in numbers, 3 in numbers) == (MAX_SIDES + 1, True, False)
    assert disk_store.tokens_of(agent.on(2)) == kept
    assert disk_store.tokens_of(agent) == first
    assert holds_tokens(disk_store.disk.root, dropped)
    disk_store.agents.delete("a")
    assert not list(disk_store.disk.walk())


def test_pinned_branches_are_kept_beside_those_used_last(disk_store, ask):
    """However many they are; what is asked next is not dropped for them."""
    ask([*SYSTEM, *said(1)])
    for n in range(MAX_SIDES + 2):
        ask(tokens_of(50, seed=20 + n))
        disk_store.agents.pin("a", branch=n + 2)
    latest = ask(tokens_of(50, seed=90))
    agent = disk_store.agents.show("a")
    assert [branch.pinned for branch in agent.sides] == [True] * (MAX_SIDES + 2) + [False]
    assert disk_store.tokens_of(agent.on(MAX_SIDES + 4)) == latest


def test_a_named_branch_is_forked_rewound_exported_and_pinned(disk_store, ask, tmp_path):
    first = ask([*SYSTEM, *said(1)])
    side = ask(tokens_of(300, seed=3))
    fork = disk_store.agents.fork("a", "b", branch=2)
    assert (disk_store.tokens_of(fork), fork.head.number) == (side, 1)
    disk_store.export_agent(disk_store.find("a", branch=2), tmp_path / "side.kw")
    with AgentStore(tmp_path / "other", LIMITS) as other:
        assert other.tokens_of(other.import_agent(tmp_path / "side.kw", IDENTITY)) == side
    last = disk_store.agents.pin("a", branch=2).branch(2).blocks[-1]
    assert disk_store.disk.index.lookups.owners(last) == ["agent:a"]
    disk_store.agents.pin("a", False, branch=2)
    assert disk_store.disk.index.lookups.owners(last) == []
    back = disk_store.agents.rewind("a", 1, branch=2)
    assert (back.head.number, disk_store.tokens_of(back)) == (2, side)
    assert disk_store.tokens_of(back.on(1)) == first
    with pytest.raises(BadInput, match="no branch 7; its branches are 2, 1"):
        disk_store.agents.fork("a", "c", branch=7)


def test_a_rewound_agent_goes_on_from_there(disk_store, ask):
    """Its last block is known by the tokens that are left, not by the longer block."""
    first = ask([*SYSTEM[:50], *said(1)])
    ask([*first, *said(2)])
    back = disk_store.agents.rewind("a", 1)
    assert back.blocks == tuple(ref.key for ref in chain(NAME, first))
    third = ask([*first, *said(3)])
    agent = disk_store.agents.show("a")
    assert (agent.turns, agent.sides) == ((len(first), len(third)), ())


def test_blocks_of_a_side_branch_are_the_agents(disk_store, ask):
    """Another agent that is deleted leaves them; deleting this one takes them."""
    ask([*SYSTEM, *said(1)])
    side = ask(tokens_of(600, seed=3))
    disk_store.agents.advance("b", NAME, side)
    disk_store.agents.delete("b")
    assert disk_store.tokens_of(disk_store.agents.show("a").on(2)) == side
    disk_store.agents.delete("a")
    assert not holds_tokens(disk_store.disk.root, side)


def test_a_pin_follows_the_head(tmp_path):
    limits = DiskLimits(max_bytes=3 << 20, min_free_bytes=0)
    with AgentStore(tmp_path / "store", limits) as disk_store:
        disk_store.disk._clock = disk_store.agents._clock = Minutes()
        old, new = [*SYSTEM, *tokens_of(400, seed=5)], [*SYSTEM, *tokens_of(400, seed=6)]
        for tokens in (old, new):
            keep(disk_store, tokens, n_bytes=100_000)
            disk_store.agents.advance("a", NAME, tokens, len(tokens) - 9)
            disk_store.agents.update("a", pinned=True)
        for seed in range(10, 40):
            keep(disk_store, tokens_of(512, seed=seed), n_bytes=100_000)
        agent = disk_store.agents.show("a")
        assert disk_store.tokens_of(agent) == new
        assert len(disk_store.tokens_of(agent.on(1))) < len(old)


def test_agent_file_lists_branches_head_first(disk_store, ask):
    first = ask([*SYSTEM, *said(1)])
    ask(TITLE)
    agent = disk_store.agents.show("a")
    fields = json.loads(disk_store.agents._path("a").read_text())
    assert fields["branches"][0]["n_tokens"] == len(first)
    assert (fields["branches"][0]["turns"], len(fields["branches"])) == ([len(first)], 2)
    assert type(agent).from_json(json.dumps(fields)) == agent
