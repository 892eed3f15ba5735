"""The page of other projects' tests: it is that of the results, and no failure is unexplained."""

import json
import re

import pytest

from tests.clients.foreign.page import RESULTS, failures, page, reason_of
from tests.clients.foreign.suites import SUITES


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def test_the_page_is_that_of_the_results(results):
    assert RESULTS.with_suffix(".md").read_text() == page(results)


@pytest.mark.parametrize("name", SUITES)
def test_every_failure_has_a_reason_and_every_reason_a_failure(results, name):
    suite = SUITES[name]
    failed = [full for _, full in failures(results[name]["tests"])]
    assert [test for test in failed if reason_of(suite, test) is None] == []
    unused = [each for each in suite.reasons if not any(re.search(each, test) for test in failed)]
    assert unused == []
