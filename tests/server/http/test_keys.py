"""Every accepted key is compared, each in constant time."""

import hashlib
import hmac
from types import SimpleNamespace

import pytest

from keepwarm import config
from keepwarm.errors import BadInput, Refused
from keepwarm.server.http import keys
from keepwarm.server.http.keys import ApiKeys, Viewer

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

    monkeypatch.setattr(keys, "hmac", Noting)
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
    monkeypatch.setattr(keys, "_digest", lambda key: Untouchable(digest(key)))
    assert is_let_in({"x-api-key": given}) is (given != "other")


@pytest.mark.parametrize(
    ("values", "sees_totals", "reads_texts"),
    [
        ({}, True, True),
        ({"api_keys": "a"}, True, True),
        ({"api_keys": "a", "admin_key": "root"}, False, True),
        ({"api_keys": "a,b"}, False, True),
        ({"api_keys": "a,b", "share_cache": True}, True, False),
    ],
)
def test_viewer_sees_totals_where_all_is_one_tenants_and_texts_where_keys_are_apart(
    values, sees_totals, reads_texts
):
    settings = config.load({}, **values)
    accepted = ApiKeys(settings)
    caller = accepted.check({"x-api-key": "a"})
    app = SimpleNamespace(state=SimpleNamespace(settings=settings, keys=accepted))
    viewer = Viewer.of(SimpleNamespace(app=app, state=caller))
    assert viewer.key_needed is ("api_keys" in values)
    assert viewer.may_see_totals is sees_totals
    assert viewer.may_read(caller.tenant) is reads_texts
    assert not viewer.may_read("another")
    assert viewer.may_see(caller.tenant)
    assert not viewer.may_see("another")
    assert not viewer.may_see(None)
    admin = viewer._replace(admin=True)
    assert admin.may_see("another")
    assert not admin.may_read("another")


# Names of keys.


@pytest.fixture
def keyed(tmp_path):
    """A function: the keys of a file with these lines, in one home."""

    def read(*lines, **values):
        file = tmp_path / "keys"
        file.write_text("\n".join(lines))
        file.chmod(0o600)
        environ = {"KEEPWARM_HOME": str(tmp_path / "home")}
        return config.load(environ, api_keys=f"@{file}", **values)

    return read


def caller(settings, key):
    return ApiKeys(settings).check({"x-api-key": key})


def test_a_name_changes_no_tenant(keyed):
    """A bare key that gets a name keeps its cache; bare keys have the begin of their digest."""
    bare = caller(keyed("secret", "other"), "secret")
    assert bare.tenant == digest("secret").hex()[:16]
    assert bare.name == bare.tenant[:8]
    named = caller(keyed("alice = secret", "other"), "secret")
    assert named == bare._replace(name="alice")


def test_a_key_is_replaced_and_its_tenant_stays(keyed):
    """Both keys work meanwhile; afterwards the old one does not."""
    before = caller(keyed("alice = old", "bob = his"), "old")
    both = keyed("alice = new", "alice = old", "bob = his")
    assert caller(both, "new") == caller(both, "old") == before
    after = keyed("alice = new", "bob = his")
    assert caller(after, "new") == before
    with pytest.raises(Refused):
        caller(after, "old")
    assert caller(after, "his").tenant != before.tenant, "the control"
    assert caller(keyed("carol = new"), "new").tenant == digest("new").hex()[:16]


def test_keys_with_equals_signs_are_bare(keyed):
    """As base64 has them; only `name = key` with spaces is a name."""
    settings = keyed("c2VjcmV0==", "a=b", "two keys", "alice = c2Vj=")
    assert settings.read_api_keys() == ("c2VjcmV0==", "a=b", "two", "keys", "c2Vj=")
    assert [named.name for named in settings.read_named_keys()] == ["", "", "", "", "alice"]


@pytest.mark.parametrize(
    "line",
    ["alice =", "= key", "a b = c", "a = b c", "admin = k", "a/b = k", "=", f"{'n' * 65} = k"],
)
def test_a_line_that_is_neither_is_refused_by_its_number(keyed, line):
    with pytest.raises(BadInput, match=r"Line 2 of .* is neither a key nor `name = key`"):
        keyed("first", line).read_api_keys()


def test_admin_key_beside_a_key_file_is_the_admin(keyed, tmp_path):
    file = tmp_path / "admin"
    file.write_text("root\n")
    file.chmod(0o600)
    for admin in ("root", f"@{file}"):
        settings = keyed("alice = secret", admin_key=admin)
        assert caller(settings, "secret").name == "alice"
        root = caller(settings, "root")
        assert (root.name, root.tenant) == ("admin", digest("root").hex()[:16])
        assert root.owner == root.tenant != caller(settings, "secret").tenant


def test_a_damaged_book_is_told_and_not_overwritten(keyed, tmp_path):
    """Otherwise names would get other tenants in silence."""
    caller(keyed("alice = old"), "old")
    book = tmp_path / "home" / "tenants.json"
    book.write_text("{")
    with pytest.raises(BadInput, match=r"tenants\.json is damaged"):
        ApiKeys(keyed("alice = new"))
    assert book.read_text() == "{"
    ApiKeys(config.load({"KEEPWARM_HOME": str(tmp_path / "home")}, api_keys="a"))


def test_a_replaced_key_finds_its_cache(serving, tmp_path):
    """Also a name's agents; another name finds nothing."""
    file = tmp_path / "keys"
    body = {"messages": [{"role": "user", "content": "The quick brown fox " * 9}], "max_tokens": 2}

    def reused(live, key):
        headers = {"x-api-key": key, "X-Keepwarm-Agent": "ops", "X-Keepwarm-Cache": "durable"}
        answer = live.post("/v1/chat/completions", body, **headers)
        assert answer.status_code == 200
        assert [one["id"] for one in live.get("/v1/agents", **headers).json()["data"]] == ["ops"]
        return sum(answer.json()["keepwarm"]["reused"].values())

    found = []
    for key in ("old", "new"):
        file.write_text(f"alice = {key}\nbob = his\n")
        file.chmod(0o600)
        with serving(home=tmp_path / "home", api_keys=f"@{file}") as live:
            found.append(reused(live, key))
            if key == "new":
                assert reused(live, "his") == 0
    assert found[0] == 0
    assert found[1] > 0
