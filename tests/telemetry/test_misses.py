"""Which requests recomputed known tokens, and where they differ from the earlier prompt."""

import pytest

from keepwarm.prefix.blocks import common_tokens, pack
from keepwarm.telemetry.misses import MissCandidate, find_miss, n_repeated
from tests.kit.engines import Models, ask, engine_on
from tests.store.kit import tokens_of


def candidate(prompt, earlier, restored=None):
    common = common_tokens(pack(prompt), pack(earlier))
    restored = common if restored is None else restored
    return MissCandidate(
        1, "", None, "tiny", 0.0, pack(prompt), pack(earlier), common, restored, 100.0
    )


HEAD, TAIL = tokens_of(40, 1), tokens_of(200, 2)


def test_a_change_at_the_top_costs_all_below_it():
    """The same text after a changed date is computed again, and that has a price."""
    miss = find_miss(candidate([*HEAD, 7, *TAIL], [*HEAD, 8, *TAIL]))
    assert miss.reason == "changed"
    assert miss.position == 40
    assert 192 <= miss.wasted <= 200
    assert miss.seconds == miss.wasted / 100.0
    assert miss.before == tuple(HEAD[-24:])
    assert miss.earlier[0] == 8
    assert miss.now[0] == 7
    assert miss.earlier[1:] == miss.now[1:]


def test_a_new_question_wastes_nothing():
    assert find_miss(candidate([*HEAD, *tokens_of(300, 3)], [*HEAD, *TAIL])).wasted == 0


@pytest.mark.parametrize(("n_new", "is_worth"), [(0, True), (400, True), (700, False)])
def test_some_phrases_are_in_every_prompt(n_new, is_worth):
    miss = find_miss(candidate([*HEAD, 7, *TAIL, *tokens_of(n_new, 5)], [*HEAD, 8, *TAIL]))
    assert miss.wasted >= 192
    assert miss.is_significant is is_worth


def test_what_was_evicted_is_computed_again():
    miss = find_miss(candidate([*HEAD, *TAIL, 1, 2], [*HEAD, *TAIL], restored=100))
    assert (miss.reason, miss.position, miss.wasted) == ("not kept", 100, 140)


def test_more_was_restored_than_is_remembered():
    """A store outlives the process that remembers prompts."""
    other = [*HEAD, *tokens_of(9), *TAIL]  # remembered, but a nearer one was stored
    assert find_miss(candidate([*HEAD, *TAIL], other, restored=100)).wasted == 0
    miss = find_miss(candidate([*HEAD, *TAIL], other, restored=41))
    assert miss.wasted > 0
    assert miss.position == miss.restored == 41  # what was restored cannot have changed
    assert miss.before == tuple(HEAD[-24:])  # the texts are shown where the two differ


@pytest.mark.parametrize(
    ("now", "earlier", "n"),
    [
        (TAIL, TAIL, 200),
        (TAIL, TAIL[3:], 192),
        (TAIL, TAIL[1:9], 8),
        (TAIL[:7], TAIL, 0),
        ([], TAIL, 0),
        (TAIL, [], 0),
    ],
)
def test_repetition_is_counted_by_phrases(now, earlier, n):
    assert n_repeated(pack(now), pack(earlier)) == n


def test_the_engine_finds_its_misses(tmp_path):
    """Only what was computed again is a miss; a continuation and a first prompt are none."""
    first = tokens_of_model(300)
    changed = [*first[:3], 5, *first[4:]]
    with engine_on(Models(tmp_path / "models").of("llama"), tmp_path / "home") as engine:
        engine.submit(ask(first, 2)).result()
        engine.submit(ask([*first, *tokens_of_model(50, 9)], 2)).result()
        assert engine.ledger.misses() == []
        engine.submit(ask(changed, 2, agent="a", tenant="")).result()
        engine.submit(ask([*changed[:-1], 9], 2, tenant="other")).result()
        (miss,) = engine.ledger.misses()
        assert (miss.number, miss.agent, miss.position) == (3, "a", 3)
        assert miss.wasted >= 280
        assert miss.prompt_tokens == 300
        assert engine.ledger.misses() == [miss]


def tokens_of_model(n, seed=4):
    return [10 + token % 80 for token in tokens_of(n, seed)]
