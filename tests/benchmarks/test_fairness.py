"""What one key's attacks cost another, in small; the whole is in docs/results/fairness.md."""

import json

import pytest
from benchmarks.attacks import ATTACKS
from benchmarks.fairness import ALL, APIS, JSON, PAGE, Models, Outcome, Times, measure, page

from tests.kit.checkpoints import write_checkpoint


def outcome(beside_ms, cost="no prefill", load_ms=0.0, failures=(), statuses=()):
    before, beside = (Times(2, ms, ms, ms) for ms in (100.0, beside_ms))
    counts = (dict.fromkeys(failures, 1), dict.fromkeys(statuses, 1))
    return Outcome("some", cost, load_ms, before, beside, "/v1/messages", *counts)


def test_the_limits_are_those_of_what_the_attack_costs():
    assert [outcome(ms).held for ms in (300, 301)] == [True, False]
    assert [outcome(ms, "prefill").held for ms in (800, 801)] == [True, False]
    assert [outcome(ms, "models", 1000.0).held for ms in (1800, 1801)] == [True, False]
    assert not outcome(1, failures=["503"]).held
    assert not outcome(1, statuses=["504"]).held
    assert outcome(1, statuses=["429", "400"]).held


def test_the_slowest_of_a_hundred_may_be_five():
    assert Times.of([0.1] * 95 + [9.0] * 5) == Times(100, 100.0, 100.0, 9000.0)
    assert Times.of([0.1] * 94 + [9.0] * 6).p95_ms == 9000.0


def test_every_attack_posts_json_or_gets():
    assert ALL not in ATTACKS
    for name, attack in ATTACKS.items():
        posted = attack.make()
        assert isinstance(json.loads(posted), dict) if posted else attack.method == "GET", name


@pytest.mark.soak
def test_an_attack_is_measured_on_a_server_of_its_own(tmp_path):
    """Not whether the limits hold: a machine that is busy says nothing about that."""
    models = Models(write_checkpoint(tmp_path / "own"), write_checkpoint(tmp_path / "other"))
    found = measure("pins", 1, models)
    assert found.statuses["200"] > 0
    assert not found.failures
    assert found.beside.tries == found.before.tries == 1
    assert found.slowest in APIS


def test_the_page_is_of_the_results():
    assert page(PAGE.read_text(), json.loads(JSON.read_text())) == PAGE.read_text()
