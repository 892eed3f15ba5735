"""The benchmark of drafts runs, and sees that no answer changes."""

import json

import pytest
from benchmarks.drafts import Trial, compare, main, turns
from benchmarks.gate import KINDS

from keepwarm import config
from keepwarm.models.load import load
from tests.kit.checkpoints import write_checkpoint


@pytest.mark.parametrize("scripted", [False, True])
def test_answers_of_a_tiny_model_are_the_same_with_drafts(scripted, tmp_path):
    model = load(str(write_checkpoint(tmp_path)), config.load({}, home=None))
    asked = [*turns("tool", 2, 200), *turns("prose", 1, 200)]
    found = compare(model, Trial(12, 0.0, scripted), asked)
    assert {kind: figures["answers"] for kind, figures in found.items()} == {"tool": 2, "prose": 1}
    assert all(figures["different"] == 0 for figures in found.values())
    assert found["tool"]["tokens"] == 24
    assert found["tool"]["lowest"] <= found["tool"]["times, CPU"] <= found["tool"]["highest"]


def test_an_answer_is_not_kept_as_a_draft_of_the_same_one():
    (turn,) = turns("tool", 1, 200)
    assert not Trial().request(turn).policy.writes


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
def test_answers_of_the_trained_models_are_the_same_with_drafts(kind, tmp_path):
    found = tmp_path / "found.json"
    main([f"benchmarks/models/{kind}", "--tokens", "24", "--turns", "2", "--json", str(found)])
    figures = json.loads(found.read_text())
    assert set(figures) == set(KINDS)
    assert all(one["different"] == 0 for one in figures.values())
