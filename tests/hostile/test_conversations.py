"""The fuzz of conversations in small; its full run is in docs/results/conversations.json."""

import json
from dataclasses import replace

import pytest

from tests.hostile.conversations.page import page
from tests.hostile.conversations.run import life_of, shares
from tests.kit.generated import CONVERSATIONS
from tests.kit.models import ARCHITECTURES
from tests.kit.runs import FedCounter

FEW = 20
SEEDS = {"gemma3_text": 2, "falcon_h1": 4}  # rows with windows, and with states; bits flip
MANY = 2000


@pytest.mark.parametrize("name", SEEDS)
def test_every_answer_is_that_of_a_cold_run(models, tmp_path, name):
    report = life_of(name, models, tmp_path, SEEDS[name]).run(FEW)
    assert report.differences == []
    assert report.n_requests == FEW
    assert report.answers["equal"] > FEW / 2
    assert report.reused["disk"] > 0
    assert report.events["records flipped"] > 0
    assert report.events["restarts"] + report.events["crashes"] > 0


class WrongWhenWarm(FedCounter):
    """A model that says something else after many tokens."""

    def __call__(self, inputs, *args, **kwargs):
        out = super().__call__(inputs, *args, **kwargs)
        return out + (inputs.shape[1] == 1) * out


def test_a_wrong_answer_is_seen(models, tmp_path):
    life = life_of("llama", models, tmp_path, seed=2)
    life._model = replace(life._model, module=WrongWhenWarm(models.module("llama")))
    report = life.run(5)
    assert len(report.differences) == report.answers["different"] > 0
    assert "llama, request" in report.differences[0]


def test_the_page_is_that_of_the_results():
    """If it fails: `python -m tests.kit.generated`."""
    results = json.loads(CONVERSATIONS.with_suffix(".json").read_text())
    assert CONVERSATIONS.with_suffix(".md").read_text() == page(results)
    reports = results["architectures"]
    assert reports.keys() <= ARCHITECTURES.keys()
    assert not any(each["differences"] for each in reports.values())
    for name, each in reports.items():
        assert sum(each["requests"].values()) == shares(MANY)[name]


@pytest.mark.soak
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_many_requests(models, tmp_path, name):
    report = life_of(name, models, tmp_path, seed=3).run(shares(MANY)[name])
    assert report.differences == []
    assert report.n_requests == shares(MANY)[name]
    assert {"restarts", "crashes", "records flipped"} <= report.events.keys()
