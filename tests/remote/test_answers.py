"""The tokens of past answers in a shared tier."""

import pytest

from keepwarm.prefix.blocks import Namespace
from keepwarm.records.cipher import Cipher
from keepwarm.remote.backend import new_memory
from keepwarm.remote.health import MAX_FAILURES
from keepwarm.remote.janitor import RemoteLimits, surplus
from keepwarm.remote.records import FleetKey, RemoteNames, parse_last
from tests.remote.conftest import CLASS, SOON
from tests.store.kit import NAMESPACE

TEXT, TOLD = "a prompt, and what asks for its answer", b"[[0, 4, [1, 2, 3]]]" * 10


@pytest.fixture(params=["plain", "sealed", "fleet key"])
def options(request):
    if request.param == "sealed":
        return {"cipher": Cipher(b"k" * 32)}
    return {"fleet_key": FleetKey(bytes(32))} if request.param == "fleet key" else {}


def test_what_one_machine_tells_another_knows_by_the_text(machine, options):
    one, other = machine(**options), machine(**options)
    one.tell(NAMESPACE, TEXT, TOLD)
    one.tell(NAMESPACE, TEXT, TOLD)
    assert other.answers_to(NAMESPACE, ["longer than that", TEXT]) == [TOLD]
    assert other.answers_to(NAMESPACE, [TEXT + "."]) == []
    assert other.answers_to(Namespace(bytes(32)), [TEXT]) == []
    one.tell(NAMESPACE, TEXT, TOLD[:40])
    assert sorted(other.answers_to(NAMESPACE, [TEXT])) == sorted([TOLD, TOLD[:40]])


def test_who_has_not_the_text_cannot_read_it(machine):
    one = machine()
    one.tell(NAMESPACE, TEXT, TOLD)
    (blob,) = one.backend.list_names(RemoteNames(CLASS).answers_to(NAMESPACE, TEXT), SOON)
    data = bytes(one.backend.read(blob.name, new_memory, SOON))
    assert len(data) == len(TOLD)
    assert TOLD[:8] not in data


def test_what_another_fleet_has_put_there_is_not_used(machine):
    one, other = machine(fleet_key=FleetKey(bytes(32))), machine(fleet_key=FleetKey(b"x" * 32))
    one.tell(NAMESPACE, TEXT, TOLD)
    assert other.answers_to(NAMESPACE, [TEXT]) == []
    assert other.is_trusted, "that is no failure of the place"


def test_a_place_that_has_failed_often_is_not_asked(machine):
    one = machine()
    one.tell(NAMESPACE, TEXT, TOLD)
    one.health.failed()
    assert one.answers_to(NAMESPACE, [TEXT]) == [TOLD], "tokens depend on it"
    for _ in range(MAX_FAILURES):
        one.health.failed()
    assert one.answers_to(NAMESPACE, [TEXT]) == []


def test_the_janitor_takes_it_like_an_end_of_a_prompt(machine):
    one = machine()
    one.tell(NAMESPACE, TEXT, TOLD)
    (blob,) = one.backend.list_names(RemoteNames(CLASS).answers_to(NAMESPACE, TEXT), SOON)
    assert parse_last(blob.name) is not None
    assert list(surplus([blob._replace(used=1.0)], RemoteLimits(age_s=10.0), now=20.0))
