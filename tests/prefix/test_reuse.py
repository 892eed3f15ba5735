"""The decision table, row by row, and what holds for every input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.prefix.blocks import pack
from keepwarm.prefix.reuse import (
    NO_CANDIDATE,
    NOTHING_STORED,
    Action,
    Candidate,
    Decision,
    Stored,
    decide,
)

RATE = 100.0  # tokens a second

PREFIX = Candidate(60, 60, can_trim=True)
PREFIX_OF_STATES = Candidate(60, 60, can_trim=False)
FORKED = Candidate(60, 90, can_trim=True)
STATES_FORKED = Candidate(60, 90, can_trim=False)
STRANGER = Candidate(0, 500, can_trim=True)

QUICK, SLOW = Stored(80, load_s=0.1), Stored(80, load_s=5.0)
SHORT = Stored(40, load_s=0.01)


@pytest.mark.parametrize(
    ("live", "stored", "expected"),
    [
        # A true prefix: go on, whatever the layers are.
        (PREFIX, NOTHING_STORED, Decision(Action.EXTEND, 60)),
        (PREFIX_OF_STATES, NOTHING_STORED, Decision(Action.EXTEND, 60)),
        (PREFIX, SHORT, Decision(Action.EXTEND, 60)),
        (PREFIX, SLOW, Decision(Action.EXTEND, 60)),
        # A beginning in common.
        (FORKED, NOTHING_STORED, Decision(Action.TRIM, 60)),
        (FORKED, SHORT, Decision(Action.TRIM, 60)),
        (FORKED, SLOW, Decision(Action.TRIM, 60)),
        # Blocks reach further and pay.
        (PREFIX, QUICK, Decision(Action.RESTORE, 80)),
        (FORKED, QUICK, Decision(Action.RESTORE, 80)),
        (STATES_FORKED, SHORT, Decision(Action.RESTORE, 40)),
        (NO_CANDIDATE, QUICK, Decision(Action.RESTORE, 80)),
        # Nothing is known.
        (NO_CANDIDATE, NOTHING_STORED, Decision(Action.PREFILL_ALL, 0)),
        (STRANGER, NOTHING_STORED, Decision(Action.PREFILL_ALL, 0)),
        # Something is, and is of no use.
        (STATES_FORKED, NOTHING_STORED, Decision(Action.REBUILD, 0)),
        (STATES_FORKED, SLOW, Decision(Action.REBUILD, 0)),
        (NO_CANDIDATE, SLOW, Decision(Action.REBUILD, 0)),
        (STRANGER, SLOW, Decision(Action.REBUILD, 0)),
    ],
)
def test_every_row_of_the_table(live, stored, expected):
    """S4-19, S4-20, S4-23."""
    assert decide(100, live, stored, RATE) == expected


def test_loading_is_measured_against_what_it_spares_beyond_the_live_cache():
    """80 stored tokens spare 20 beyond the 60 that live: 0.2 s at this rate, and no more."""
    assert decide(100, PREFIX, Stored(80, 0.2), RATE).action is Action.RESTORE
    assert decide(100, PREFIX, Stored(80, 0.21), RATE).action is Action.EXTEND
    assert decide(100, NO_CANDIDATE, Stored(80, 0.21), RATE).action is Action.RESTORE


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        (Candidate(100, 100, can_trim=True), Decision(Action.TRIM, 99)),
        (Candidate(100, 150, can_trim=True), Decision(Action.TRIM, 99)),
        (Candidate(100, 100, can_trim=False), Decision(Action.REBUILD, 0)),
        (Candidate(99, 99, can_trim=False), Decision(Action.EXTEND, 99)),
    ],
)
def test_one_token_is_left_to_feed(live, expected):
    """S4-17: a cache that holds the whole prompt is not a hit as it is."""
    assert decide(100, live, NOTHING_STORED, RATE) == expected


def test_a_longer_conversation_of_other_content_is_a_miss():
    """S4-21, S4-22: token 0 differs, everything else, length included, would fit."""
    held, prompt = list(range(200)), [7, *range(1, 300)]
    found = Candidate.of(pack(held), pack(prompt), can_trim=True)
    assert found == Candidate(0, 200, can_trim=True)
    assert decide(len(prompt), found).action is Action.PREFILL_ALL
    late = Candidate.of(pack(held), pack([*range(150), 7, *range(151, 300)]), can_trim=True)
    assert decide(300, late) == Decision(Action.TRIM, 150)


@st.composite
def cases(draw):
    n_prompt = draw(st.integers(0, 40))
    n_held = draw(st.integers(0, 40))
    live = Candidate(
        draw(st.integers(0, min(n_prompt, n_held))), n_held, can_trim=draw(st.booleans())
    )
    stored = Stored(draw(st.integers(0, 50)), draw(st.floats(0, 2)))
    return n_prompt, live, stored, draw(st.floats(1, 1000))


@given(cases())
def test_what_holds_for_every_decision(case):
    n_prompt, live, stored, rate = case
    action, n_tokens = decide(n_prompt, live, stored, rate)
    assert 0 <= n_tokens <= max(0, n_prompt - 1)
    match action:
        case Action.EXTEND:
            assert n_tokens == live.n_held == live.n_common
        case Action.TRIM:
            assert live.can_trim
            assert 0 < n_tokens <= live.n_common
            assert n_tokens < live.n_held
        case Action.RESTORE:
            assert live.serves(n_prompt) < n_tokens <= stored.n_tokens
        case _:
            assert n_tokens == 0
            assert live.serves(n_prompt) == 0


@given(cases())
def test_no_better_choice_is_left(case):
    """By time: what is loaded plus what is computed is the least of all ways."""
    n_prompt, live, stored, rate = case
    chosen = decide(n_prompt, live, stored, rate)
    ways = {0: 0.0, live.serves(n_prompt): 0.0}
    ways[min(stored.n_tokens, max(0, n_prompt - 1))] = stored.load_s
    ways[live.serves(n_prompt)] = 0.0
    ways[0] = 0.0
    cost = {n: load_s + (n_prompt - n) / rate for n, load_s in ways.items()}
    assert cost[chosen.n_tokens] <= min(cost.values()) + 1e-9
