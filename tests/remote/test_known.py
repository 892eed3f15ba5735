"""What is remembered of a shared tier, and for how long."""

import pytest

from keepwarm.prefix.blocks import chain, common_tokens, pack
from keepwarm.records.record import Part
from keepwarm.remote import known as module
from keepwarm.remote.known import (
    ABSENT_S,
    MAX_CHILDREN,
    PRESENT_S,
    KnownRecord,
    KnownRecords,
)
from keepwarm.remote.names import RecordPlace, RemoteNames, parse_last
from tests.store.kit import NAMESPACE, refs_of, root_key, tokens_of


@pytest.fixture
def known(clock):
    return KnownRecords(clock)


def record(ref, part=Part.DELTA, **fields):
    place = RecordPlace(NAMESPACE, ref.parent, ref.key, part)
    return KnownRecord(place, ref.tokens, 1000, **fields)


def test_a_present_record_is_believed_for_a_minute_an_absent_one_for_seconds(known, clock):
    there, gone = refs_of(2)
    known.add([record(there)])
    known.add_absent([record(gone).place])
    assert known.is_answered(record(there).place)
    assert known.is_answered(record(gone).place)
    assert known.have([there.key, gone.key]).keys() == {there.key}
    clock.now += ABSENT_S
    assert not known.is_answered(record(gone).place)
    assert known.is_answered(record(there).place)
    clock.now += PRESENT_S
    assert not known.is_answered(record(there).place)
    assert known.have([there.key]) == {}
    assert known.children(root_key(), there.tokens) == []


def test_parts_of_a_block_are_one(known):
    (ref,) = refs_of(1)
    known.add([record(ref), record(ref, Part.WINDOW, w_rows=7)])
    assert known.have([ref.key])[ref.key] == (
        frozenset({Part.DELTA, Part.WINDOW}),
        256,
        7,
        2000,
    )


def test_all_that_follows_a_lost_block_is_absent(known, clock):
    refs = refs_of(4)
    (other,) = refs_of(1, seed=1)
    known.add(record(ref) for ref in (*refs, other))
    known.lose(refs[1].key)
    assert known.have([*(ref.key for ref in refs), other.key]).keys() == {refs[0].key, other.key}
    assert known.is_answered(record(refs[3]).place)
    clock.now += ABSENT_S
    assert not known.is_answered(record(refs[3]).place)


def test_children_are_found_by_their_tokens_and_states_by_their_parent(known):
    near, far = refs_of(1, n_last=200), refs_of(1, seed=1, n_last=100)
    known.add([record(near[0]), record(far[0], Part.STATE)])
    query = near[0].tokens[: 4 * 50] + far[0].tokens[: 4 * 50]
    (child,) = known.children(root_key(), query)
    assert child == (near[0].key, common_tokens(near[0].tokens, query))
    assert known.states([root_key()]) == [(far[0].key, root_key(), 100)]


def test_what_a_prompt_continues_is_always_among_the_children(known):
    """However many others share more of it: a conversation may go on there."""
    tokens = tokens_of(200)
    others = [next(chain(NAMESPACE, [*tokens[:100], n])) for n in range(40)]
    begun = next(chain(NAMESPACE, tokens[:50]))
    known.add(record(ref) for ref in (*others, begun))
    found = known.children(root_key(), pack(tokens))
    assert begun.key in {child.key for child in found}
    assert len(found) == MAX_CHILDREN + 1


def test_the_oldest_answers_are_forgotten(known, monkeypatch):
    monkeypatch.setattr(module, "MAX_KNOWN", 3)
    refs = refs_of(5)
    for ref in refs:
        known.add([record(ref)])
    assert known.have([ref.key for ref in refs]).keys() == {ref.key for ref in refs[2:]}
    assert known.children(refs[0].parent, refs[0].tokens) == []


def test_names_tell_key_and_part():
    place = record(refs_of(2)[1], Part.STATE).place
    name = RemoteNames("cpu-mlx-0.1").of(place)
    assert name == f"cpu-mlx-0.1/{NAMESPACE.hex()}/{place.parent.hex()}/{place.key.hex()}.s"
    assert parse_last(name) == (place.key, Part.STATE)


@pytest.mark.parametrize("name", ["", "a/b", "a/00.d", f"a/{'0' * 40}", f"a/{'0' * 40}.x", "x.d"])
def test_other_names_are_not_ours(name):
    assert parse_last(name) is None
