"""The tokens of past answers in a shared tier."""

import pytest

from keepwarm.prefix.blocks import Namespace
from keepwarm.records.cipher import Cipher
from keepwarm.remote.deleter import erase_from_tier
from keepwarm.remote.health import MAX_FAILURES
from keepwarm.remote.janitor import RemoteLimits, surplus
from keepwarm.remote.records import FleetKey, RemoteNames, parse_last
from keepwarm.store.tier import NamedBlock
from tests.contract.shared import names_in
from tests.remote.conftest import CLASS, SOON
from tests.remote.test_erase_blocks import ending
from tests.store.kit import NAMESPACE, record, tokens_of

END, BESIDE = (ending([*tokens_of(300), n]) for n in (1, 2))
END_OF = NAMESPACE, END.parent, END.key
TEXT, TOLD = "a prompt, and what asks for its answer", b"[[0, 4, [1, 2, 3]]]" * 10


@pytest.fixture(params=["plain", "sealed", "fleet key"])
def options(request):
    if request.param == "sealed":
        return {"cipher": Cipher(b"k" * 32)}
    return {"fleet_key": FleetKey(bytes(32))} if request.param == "fleet key" else {}


def test_what_one_machine_tells_another_knows_by_the_text(machine, options):
    one, other = machine(**options), machine(**options)
    one.tell(NAMESPACE, TEXT, TOLD, END)
    one.tell(NAMESPACE, TEXT, TOLD, END)
    assert other.answers_to(NAMESPACE, ["longer than that", TEXT]) == [TOLD]
    assert other.answers_to(NAMESPACE, [TEXT + "."]) == []
    assert other.answers_to(Namespace(bytes(32)), [TEXT]) == []
    one.tell(NAMESPACE, TEXT, TOLD[:40], END)
    assert sorted(other.answers_to(NAMESPACE, [TEXT])) == sorted([TOLD, TOLD[:40]])


def test_it_goes_with_the_block_that_the_answer_ends_in(machine, place, options):
    """And what another conversation was told of stays."""
    one = machine(**options)
    one.tell(NAMESPACE, TEXT, TOLD, END)
    one.tell(NAMESPACE, "another", TOLD[:40], BESIDE)
    assert len(told_in(place)) == 4
    doomed = NamedBlock(END.key, END.parent, END.n_tokens)
    assert erase_from_tier(one, [NAMESPACE], [doomed], keep=[END.key])
    assert one.answers_to(NAMESPACE, [TEXT]) == [TOLD], "another agent has it"
    assert erase_from_tier(one, [NAMESPACE], [doomed], keep=())
    assert one.answers_to(NAMESPACE, [TEXT, "another"]) == [TOLD[:40]]
    assert len(told_in(place)) == 2


def test_what_is_read_is_evicted_before_what_names_it(machine, place, options, monkeypatch):
    """Nothing could delete it without that."""
    one, other = machine(**options), machine(**options)
    one.tell(NAMESPACE, TEXT, TOLD, END)
    touched = []
    monkeypatch.setattr(other.backend, "touch", lambda names, _: touched.extend(names))
    assert other.answers_to(NAMESPACE, [TEXT]) == [TOLD]
    assert sorted(touched) == sorted(names_in(place))
    assert parse_last(touched[-1]).key == END.key, "the last is evicted last"


def test_all_that_was_told_of_the_same_end_goes_with_it(machine, place, options):
    one = machine(**options)
    one.tell(NAMESPACE, TEXT, TOLD, END)
    assert one.tell(NAMESPACE, TEXT, TOLD[:40], END, is_wanted=lambda: False)
    assert one.answers_to(NAMESPACE, [TEXT]) == [TOLD]
    one.tell(NAMESPACE, "another text", TOLD[:40], END)
    doomed = NamedBlock(END.key, END.parent, END.n_tokens)
    assert erase_from_tier(one, [NAMESPACE], [doomed], keep=())
    assert names_in(place) == []


def test_a_block_goes_with_its_beginning_that_an_answer_ended_in(machine, place, options):
    one, tokens = machine(**options), tokens_of(100)
    shorter, longer = ending(tokens[:44]), ending(tokens)
    one.put(record(shorter))
    one.put(record(longer))
    one.tell(NAMESPACE, TEXT, TOLD, shorter)
    doomed = NamedBlock(longer.key, longer.parent, longer.n_tokens)
    assert erase_from_tier(one, [NAMESPACE], [doomed], keep=())
    assert names_in(place) == []


def test_a_pointer_that_somebody_has_made_deletes_nothing_else(machine, place):
    """It can name nothing but what is told."""
    one, names = machine(), RemoteNames(CLASS)
    one.put(record(BESIDE))
    (kept,) = before = names_in(place)
    doomed = NamedBlock(END.key, END.parent, END.n_tokens)
    to_told = names.of_pointer(*END_OF, f"{'0' * 40}/001.{'1' * 40}.a.0")
    for pointer in (to_told, to_told[:-4] + ".0", names.of_pointer(*END_OF, kept)):
        place.put(pointer, [kept.encode()], SOON)
        assert erase_from_tier(one, [NAMESPACE], [doomed], keep=())
        assert names_in(place) == before


def told_in(place):
    return [name for name in names_in(place) if (word := parse_last(name)) and word.part is None]


def test_what_another_fleet_has_put_there_is_not_used(machine):
    one, other = machine(fleet_key=FleetKey(bytes(32))), machine(fleet_key=FleetKey(b"x" * 32))
    one.tell(NAMESPACE, TEXT, TOLD, END)
    assert other.answers_to(NAMESPACE, [TEXT]) == []
    assert other.is_trusted, "that is no failure of the place"


def test_a_place_that_has_failed_often_is_not_asked(machine):
    one = machine()
    one.tell(NAMESPACE, TEXT, TOLD, END)
    one.health.failed()
    assert one.answers_to(NAMESPACE, [TEXT]) == [TOLD], "tokens depend on it"
    for _ in range(MAX_FAILURES):
        one.health.failed()
    assert one.answers_to(NAMESPACE, [TEXT]) == []


def test_the_janitor_takes_it_like_an_end_of_a_prompt(machine):
    one = machine()
    one.tell(NAMESPACE, TEXT, TOLD, END)
    (blob,) = one.backend.list_names(RemoteNames(CLASS).answers_to(NAMESPACE, TEXT), SOON)
    assert parse_last(blob.name) is not None
    assert list(surplus([blob._replace(used=1.0)], RemoteLimits(age_s=10.0), now=20.0))
