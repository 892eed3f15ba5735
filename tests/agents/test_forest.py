"""The forest: blocks merged into runs, with who shares them and where they lie."""

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.agents.agent import Agent, Branch
from keepwarm.agents.forest import build_forest
from keepwarm.prefix.blocks import BLOCK_TOKENS, chain
from keepwarm.records.record import Part
from keepwarm.store.tier import StoredBlock
from tests.store.kit import NAMESPACE, tokens_of

COMMON = tokens_of(4 * BLOCK_TOKENS)


def blocks(tokens, used=0.0, pinned=False, size=10):
    """A prompt as a tier would list it; a pin is on its last block."""
    refs = list(chain(NAMESPACE, tokens))
    return [
        StoredBlock(
            ref.key, ref.parent, NAMESPACE, ref.number, ref.n_tokens, {Part.DELTA: size}, used,
            pinned and ref is refs[-1],
        )
        for ref in refs
    ]  # fmt: skip


def prompt(name, n_blocks=2):
    return COMMON + tokens_of(n_blocks * BLOCK_TOKENS, seed=name)


def agent(name, tokens):
    return Agent(name, Branch.of(NAMESPACE, tokens))


def merged(*prompts, **how):
    return list(
        {block.key: block for tokens in prompts for block in blocks(tokens, **how)}.values()
    )


def test_a_conversation_is_one_run():
    """Blocks that follow each other and do not differ are drawn as one."""
    tokens = tokens_of(5 * BLOCK_TOKENS + 7)
    stored = [block._replace(used=float(n)) for n, block in enumerate(blocks(tokens), start=1)]
    (run,) = build_forest({"disk": stored}, [agent("a", tokens)]).runs
    assert (run.number, run.n_blocks, run.n_tokens, run.n_bytes) == (0, 6, len(tokens), 60)
    assert run.parent is None
    assert (run.agents, run.ends) == (("a",), ("a",))
    assert (run.tiers, run.oldest, run.used) == (frozenset({"disk"}), 1.0, 6.0)


def test_what_a_running_prompt_will_have_is_in_no_tier():
    """Its whole blocks; the open one will be another when the answer is there."""
    tokens = prompt(1, 3) + tokens_of(7, seed=9)
    forest = build_forest({"disk": blocks(COMMON)}, [agent("a", tokens)], [agent("", tokens).head])
    stored, planned = forest.runs
    assert (stored.n_blocks, stored.tiers, stored.agents) == (4, {"disk"}, ("a",))
    assert (planned.number, planned.n_blocks, planned.n_bytes) == (4, 3, 0)
    assert (planned.tiers, planned.parent, planned.ends) == (frozenset(), stored.key, ("a",))
    assert (forest.n_blocks, forest.left_out) == (4, 0)


def test_what_running_prompts_will_have_takes_the_room_of_nothing_stored():
    other = tokens_of(6 * BLOCK_TOKENS, seed=2)
    forest = build_forest({"disk": blocks(COMMON)}, [], [agent("", other).head], max_blocks=4)
    assert {(run.n_blocks, run.tiers) for run in forest.runs} == {
        (4, frozenset({"disk"})),
        (4, frozenset()),
    }
    assert forest.left_out == 0


def test_a_fork_splits_and_says_who_shares():
    """The common part is there once, and is both agents'."""
    a, b = prompt(1), prompt(2, 3)
    forest = build_forest({"disk": merged(a, b)}, [agent("a", a), agent("b", b)])
    first, *branches = forest.runs
    assert (first.n_blocks, first.agents, first.ends) == (4, ("a", "b"), ())
    assert {(run.parent, run.number, run.n_blocks, run.ends) for run in branches} == {
        (first.key, 4, 2, ("a",)),
        (first.key, 4, 3, ("b",)),
    }
    assert forest.n_blocks == 9


def test_an_agent_ends_inside_what_another_goes_on_with():
    long, short = prompt(1, 4), prompt(1, 4)[: 6 * BLOCK_TOKENS]
    runs = build_forest({"disk": blocks(long)}, [agent("long", long), agent("short", short)]).runs
    assert [(run.n_blocks, run.agents, run.ends) for run in runs] == [
        (6, ("long", "short"), ("short",)),
        (2, ("long",), ("long",)),
    ]


def test_places_tell_runs_apart():
    tokens = tokens_of(6 * BLOCK_TOKENS)
    on_disk, in_memory = blocks(tokens, used=1.0), blocks(tokens, used=5.0)[:2]
    runs = build_forest({"memory": in_memory, "disk": on_disk}).runs
    assert [(run.n_blocks, run.tiers, run.used) for run in runs] == [
        (2, frozenset({"memory", "disk"}), 5.0),
        (4, frozenset({"disk"}), 1.0),
    ]


def test_a_pin_protects_all_before_it():
    a, b = prompt(1), prompt(2)
    pinned = blocks(a, pinned=True)
    forest = build_forest({"disk": {block.key: block for block in blocks(b) + pinned}.values()})
    assert [run.pinned for run in forest.runs if run.number == 0] == [True]
    assert sorted(run.pinned for run in forest.runs if run.number == 4) == [False, True]


def test_too_many_are_left_out_the_oldest_first():
    """What is drawn hangs together: nothing without that which it follows."""
    old, new = tokens_of(8 * BLOCK_TOKENS, seed=1), tokens_of(8 * BLOCK_TOKENS, seed=2)
    forest = build_forest({"disk": blocks(old, used=1.0) + blocks(new, used=2.0)}, max_blocks=8)
    (run,) = forest.runs
    assert (run.n_blocks, run.used, forest.n_blocks, forest.left_out) == (8, 2.0, 8, 8)


def test_what_lost_its_beginning_is_shown_too():
    tokens = tokens_of(4 * BLOCK_TOKENS)
    (run,) = build_forest({"disk": blocks(tokens)[2:]}, [agent("a", tokens)]).runs
    assert (run.parent, run.number, run.n_blocks) == (None, 2, 2)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_no_block_is_lost_or_told_twice(shapes):
    """Whatever conversations there are, runs are all blocks, and each follows its parent."""
    prompts = [COMMON[: n * BLOCK_TOKENS] + tokens_of(m * 200 + 1, seed=m) for n, m in shapes]
    stored = merged(*prompts)
    agents = [agent(str(name), tokens) for name, tokens in enumerate(prompts)]
    forest = build_forest({"disk": stored}, agents)
    assert sum(run.n_blocks for run in forest.runs) == len(stored) == forest.n_blocks
    assert sum(run.n_tokens for run in forest.runs) == sum(block.n_tokens for block in stored)
    place = {run.key: row for row, run in enumerate(forest.runs)}
    runs = forest.runs
    assert all(run.parent is None or place[run.parent] < place[run.key] for run in runs)
    ends = [runs[place[run.parent]] for run in runs if run.parent is not None]
    starts = [run for run in runs if run.parent is not None]
    assert all(p.number + p.n_blocks == run.number for p, run in zip(ends, starts, strict=True))
    assert sorted(name for run in runs for name in run.ends) == sorted(a.id for a in agents)
