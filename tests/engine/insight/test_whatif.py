"""What another budget would have saved, from look-ups that hold no tokens."""

import pytest

from keepwarm.engine.insight.whatif import LoggedLookup, LookupLog, replay, what_if
from keepwarm.prefix.blocks import BLOCK_TOKENS
from tests.store.kit import NAMESPACE, tokens_of

SIZE = 10  # bytes of a block


def lookup(*blocks, n_asked=None):
    return LoggedLookup(0.0, blocks, len(blocks) if n_asked is None else n_asked, SIZE)


def found(lookups, n_blocks):
    """Blocks found with room for so many."""
    return replay(lookups, None if n_blocks is None else n_blocks * SIZE) // BLOCK_TOKENS


def test_what_was_kept_is_found_again():
    lookups = [lookup(1, 2, 3), lookup(1, 2, 4)]
    assert found(lookups, None) == 2
    assert found(lookups, 3) == 2


def test_two_that_do_not_fit_together_push_each_other_out():
    """The budget that would have held both is where it begins to pay."""
    turns = [lookup(1, 2, 3), lookup(4, 5, 6)] * 3
    assert [found(turns, n) for n in (3, 5, 6, None)] == [0, 8, 12, 12]


def test_ends_go_before_beginnings():
    """As in every tier: a block is of no use without those before it."""
    assert found([lookup(1, 2, 3, 4), lookup(9), lookup(1, 2, 3, 4)], 4) == 3


def test_blocks_of_the_answer_are_kept_and_not_asked_for():
    assert found([lookup(1, 2, n_asked=1), lookup(1, 2, 3, n_asked=2)], None) == 2
    assert found([lookup(1, 2, n_asked=0), lookup(1, 2, n_asked=0)], None) == 0


def test_budgets_around_the_one_of_now():
    turns = [lookup(1, 2, 3), lookup(4, 5, 6)] * 3
    answer = what_if(turns, 3 * SIZE)
    assert [outcome.max_bytes for outcome in answer.outcomes] == [15, 30, 60, 120, None]
    assert [o.n_tokens // BLOCK_TOKENS for o in answer.outcomes] == [0, 0, 12, 12, 12]
    assert answer.asked_tokens == 18 * BLOCK_TOKENS
    assert answer.n_lookups == 6


def test_nothing_was_looked_up():
    answer = what_if([], 100)
    assert (answer.n_lookups, answer.since, answer.asked_tokens) == (0, None, 0)
    assert {outcome.n_tokens for outcome in answer.outcomes} == {0}


def test_prompts_are_remembered_by_whole_blocks():
    """The same prompt is the same digests; the last token is always fed, so it is not asked for."""
    lookups = LookupLog(clock=lambda: 7.0)
    tokens = tokens_of(3 * BLOCK_TOKENS)
    lookups.add(NAMESPACE, tokens, len(tokens), SIZE)
    lookups.add(NAMESPACE, tokens + tokens_of(BLOCK_TOKENS, 1), len(tokens) + 1, SIZE)
    lookups.add(NAMESPACE, tokens[:5], 5, SIZE)  # fills no block
    first, second = lookups.all()
    assert (first.when, first.n_asked, len(first.blocks)) == (7.0, 2, 3)
    assert (second.n_asked, len(second.blocks)) == (3, 4)
    assert second.blocks[:3] == first.blocks
    assert found([first, second], None) == 3


def test_no_token_is_in_it():
    """Hash-only: what is remembered has nothing of the prompt."""
    lookups = LookupLog()
    tokens = tokens_of(2 * BLOCK_TOKENS)
    lookups.add(NAMESPACE, tokens, len(tokens), SIZE)
    (one,) = lookups.all()
    assert not set(one.blocks) & set(tokens)
    assert len(one.blocks) == 2


@pytest.mark.parametrize("max_blocks", [4, 6])
def test_only_the_latest_are_remembered(max_blocks):
    lookups = LookupLog(max_blocks)
    for seed in range(10):
        tokens = tokens_of(2 * BLOCK_TOKENS, seed)
        lookups.add(NAMESPACE, tokens, len(tokens), seed)
    assert [one.block_bytes for one in lookups.all()] == list(range(10))[-max_blocks // 2 :]
