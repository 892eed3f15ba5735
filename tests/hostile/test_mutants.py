"""Files by strangers: mutants of every format end in our own errors, within bounds.

`python -m tests.kit.mutants.fuzz FORMAT --first NUMBER --count 1` reads one of them again.
"""

import pytest

from tests.kit.mutants.fuzz import FORMATS, Summary, fuzz, fuzz_in_batches

FEW, MANY = 100, 100_000


@pytest.fixture(scope="module")
def summaries() -> dict[str, Summary]:
    """One child for all formats: starting one takes longer than reading a thousand mutants."""
    return {summary.format: summary for summary in fuzz(list(FORMATS), 0, FEW)}


@pytest.mark.parametrize("name", FORMATS)
def test_mutants_are_refused_with_a_sentence(name, summaries):
    check(summaries[name], FEW)


@pytest.mark.soak
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutants_are_refused_with_a_sentence(name):
    check(fuzz_in_batches(name, FEW, MANY), MANY)


def check(summary, count):
    assert summary.failures == []
    assert summary.accepted + sum(summary.errors.values()) == count
    assert summary.accepted, "no mutant was whole enough to reach the last check"


@pytest.mark.parametrize(
    ("control", "says"),
    [
        ("raises", "ValueError: not ours"),
        ("takes memory", "MemoryError"),
        ("keeps memory", "memory grew by"),
        ("dies", "the process ended with -6"),
    ],
)
def test_a_reader_with_a_fault_is_reported(control, says):
    (summary,) = fuzz([control], 0, 1)
    assert says in " ".join(summary.failures)
