"""The page of other projects' tests: it is that of the results, and no failure is unexplained."""

import json

import pytest

from tests.clients.foreign.__main__ import said_in
from tests.clients.foreign.page import RESULTS, Failure, changes_of, failures, page, reason_of
from tests.clients.foreign.suites import SUITES, Reason, Suite

TRACE = """unit/test_basic.py:20: in test_server
    res = server.make_request("GET", "/props")
unit/test_basic.py:25: in test_server
    assert res.status_code == 200
           ^^^^^^^^^^^^^^^^^^^^^^
E   AssertionError: assert 404 == 200
E    +  where 404 = Response(url='http://127.0.0.1:8080')
"""


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def test_the_page_is_that_of_the_results(results):
    assert RESULTS.with_suffix(".md").read_text() == page(results)


@pytest.mark.parametrize("name", SUITES)
def test_every_failure_has_a_reason_and_every_reason_a_failure(results, name):
    suite = SUITES[name]
    found = {each: reason_of(suite, each) for each in failures(results[name]["tests"])}
    assert [failure for failure, reason in found.items() if reason is None] == []
    assert [each for each in suite.reasons if each not in found.values()] == []


def test_a_reason_is_what_the_assertion_says_not_what_the_test_is_called():
    meant = Reason(r"assert 404 == 200$", "no such route", "props")
    suite = Suite("", "", "", (), (), (meant,), {})
    said = said_in(TRACE)
    assert said == "assert res.status_code == 200 → AssertionError: assert 404 == 200"
    assert reason_of(suite, Failure("test_basic.py::test_props", "", said)) == meant
    assert reason_of(suite, Failure("test_basic.py::test_props", "", "assert 500 == 200")) is None
    assert reason_of(suite, Failure("test_basic.py::test_slots", "", said)) is None


def test_what_another_run_says_otherwise_is_left_out():
    assert said_in("E  at http://127.0.0.1:8080/v1, <X at 0x7f00>") == (
        " → at http://127.0.0.1:…/v1, <X at …>"
    )
    assert said_in("it ended\n") == "it ended → "


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_what_a_plugin_changes_is_on_the_page(results, suite):
    listed = changes_of(suite).splitlines()
    assert len(listed) >= 4
    assert all(line.startswith("- ") for line in listed)
    assert all(line in RESULTS.with_suffix(".md").read_text() for line in listed)
