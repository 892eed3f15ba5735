"""Every accepted key is compared, each in constant time."""

import hashlib
import hmac

import pytest

from keepwarm import config
from keepwarm.errors import Refused
from keepwarm.server.http import limits
from keepwarm.server.http.limits import ApiKeys

KEYS = ("first", "second", "third")
SETTINGS = config.load({}, api_keys=",".join(KEYS), admin_key="root")


@pytest.fixture
def compared(monkeypatch):
    """What was compared, by the real function."""
    pairs = []

    def noting(one, other):
        pairs.append((one, other))
        return hmac.compare_digest(one, other)

    class Noting:
        compare_digest = staticmethod(noting)

    monkeypatch.setattr(limits, "hmac", Noting)
    return pairs


def digest(key):
    return hashlib.sha256(key.encode()).digest()


def is_let_in(headers):
    try:
        ApiKeys(SETTINGS).check(headers)
    except Refused:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "let_in"),
    [*((key, True) for key in (*KEYS, "root")), *((key, False) for key in ("", "fir", "other"))],
)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_every_key_is_compared_whichever_was_given(compared, header, given, let_in):
    """Digests of one length, all of them, though the first may have matched already."""
    value = f"Bearer {given}" if header == "authorization" else given
    assert is_let_in({header: value}) is let_in
    assert {one for one, _ in compared} == {digest(given)}
    assert sorted(other for _, other in compared) == sorted(map(digest, (*KEYS, "root")))


class Untouchable(bytes):
    """A digest that may not be compared in any other way."""

    __hash__ = bytes.__hash__

    def __eq__(self, other):
        raise AssertionError("compared by the equality of bytes, which stops at the first")


@pytest.mark.parametrize("given", [*KEYS, "root", "other"])
def test_keys_are_compared_in_no_other_way(monkeypatch, given):
    monkeypatch.setattr(limits, "_digest", lambda key: Untouchable(digest(key)))
    assert is_let_in({"x-api-key": given}) is (given != "other")
