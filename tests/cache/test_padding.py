"""Verdicts on disk: best effort, and never in the way."""

from dataclasses import replace

import pytest

from keepwarm.cache.disk_store import DiskStore
from keepwarm.cache.padding import KnownVerdict, PaddingBook
from keepwarm.cache.padding_trial import Verdict
from keepwarm.prefix.fingerprint import namespace
from keepwarm.store.disk.upkeep import write_file
from tests.cache.agents.test_agents import IDENTITY, LIMITS

RIGHT = KnownVerdict("right", "0.32.2", Verdict(True, 0.0, 0.0, 4111))
WRONG = KnownVerdict("wrong", "0.32.2", Verdict(False, 0.5, 0.0, 97))


def test_verdicts_of_two_processes_are_both_kept(tmp_path):
    path = tmp_path / "home" / "padding.json"
    first, second = PaddingBook(path), PaddingBook(path)
    first.put("a", RIGHT, keep=True)
    second.put("b", WRONG, keep=True)
    again = PaddingBook(path)
    assert (again.get("a"), again.get("b"), again.get("c")) == (RIGHT.verdict, WRONG.verdict, None)
    assert again.alone() == [WRONG]


def test_only_rows_that_an_earlier_version_wrote_are_not_trusted(tmp_path):
    """It registered its models too, but tried no batches."""
    with DiskStore(tmp_path / "store", LIMITS) as store:
        name = store.register(IDENTITY)
        assert store.trusts_rows(name)
        old = replace(IDENTITY, config="old")
        write_file(store.disk, store._identity_path(namespace(old)), b"{}")
        assert not store.trusts_rows(store.register(old))
        store.trust_rows(namespace(old))
    with DiskStore(tmp_path / "store", LIMITS) as store:
        assert store.trusts_rows(name)
        assert store.trusts_rows(namespace(old))


def test_what_is_not_to_be_kept_holds_for_this_process(tmp_path):
    path = tmp_path / "padding.json"
    book = PaddingBook(path)
    book.put("a", WRONG, keep=False)
    assert book.get("a") == WRONG.verdict
    assert PaddingBook(path).get("a") is None


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"model": "m", "mlx_lm": "1"}}'])
def test_a_damaged_file_is_no_verdict(tmp_path, text):
    path = tmp_path / "padding.json"
    path.write_text(text)
    book = PaddingBook(path)
    assert book.get("a") is None
    book.put("a", RIGHT, keep=True)
    assert PaddingBook(path).get("a") == RIGHT.verdict
