"""Servers asked the same in turn; engines in this process stand for them."""

import json
from dataclasses import replace

import pytest
from benchmarks.comparison import (
    AGENTS,
    COLD,
    OTHER,
    REPEAT,
    RESTARTED,
    TURNS,
    Visit,
    changed,
    flip,
    flipped,
    sample,
    spread,
    table,
)
from benchmarks.requests.run import QUICK
from benchmarks.requests.suite import run_factory
from benchmarks.requests.targets import InProcess

from keepwarm.errors import Unreachable
from tests.kit import generated
from tests.kit.checkpoints import write_checkpoint

NAMES = ("keepwarm", "mlx-lm")


class Reopened(InProcess):
    """Loads its weights at every start, as a process does."""

    def kill(self):
        self.close()


@pytest.fixture
def visits(tmp_path):
    model = write_checkpoint(tmp_path / "model", n_context=4096)
    sizes = replace(QUICK, samples=1, first_turn=400)
    make_run = run_factory(model, tmp_path, sizes)
    targets = [Reopened(name, model, tmp_path / name) for name in NAMES]
    made = []
    for target in targets:
        target.start()
        run = make_run("comparison", target, lambda _: None)
        made.append(Visit(run, {"version": "1", "samples": []}))
    yield made
    for target in targets:
        target.close()


def test_every_server_meets_every_situation(visits):
    sample(visits, 0)
    for each in visits:
        (steps,) = each.found["samples"]
        assert list(steps) == [COLD, REPEAT, OTHER, TURNS, AGENTS, RESTARTED]
        assert steps[COLD].n_cached < 32
        for what in (REPEAT, RESTARTED):
            assert steps[what].n_cached == steps[what].n_prompt - 1


def test_a_server_that_fails_has_no_further_part(visits):
    def fail():
        raise Unreachable("Gone.")

    visits[0].attempt("a trial", fail)
    sample(visits, 0)
    flipped(visits)
    changed(visits)
    assert visits[0].found == {"version": "1", "samples": [{}], "failure": "a trial: Gone."}
    assert len(visits[1].found["samples"][0]) == 6
    assert {"flipped", "weights"} <= visits[1].found.keys()


def test_damage_and_other_weights_are_seen(visits):
    flipped(visits)
    changed(visits)
    for each in visits:
        assert each.found["undamaged"]["cached"] > each.found["flipped"]["cached"]
        assert each.found["undamaged"]["same"]
        assert each.found["flipped"]["files"] > 0
        assert each.found["flipped"]["same"]
        assert each.found["weights"] == {"cached": 0, "same": True}


def test_bytes_are_flipped_behind_the_header(tmp_path):
    small, index, payload = (tmp_path / name for name in ("small", "index.sqlite", "payload"))
    for path, n_bytes in ((small, 1 << 10), (index, 1 << 15), (payload, 1 << 15)):
        path.write_bytes(bytes(n_bytes))
    assert flip(tmp_path) == 1
    content = payload.read_bytes()
    assert not any(content[: 1 << 13])
    assert any(content)
    assert not any(small.read_bytes() + index.read_bytes())


def test_a_wide_figure_is_a_range():
    assert spread([1.0, 1.05, 1.0]) == "1"
    assert spread([1.0, 1.5, 1.2]) == "1 to 1.5"
    assert spread([0.0345]) == "0.03"
    assert spread([12.3]) == "10"


def test_the_pages_show_the_results():
    results = table(json.loads(generated.COMPARISON_RESULTS.read_text()))
    for page in (generated.COMPARISON, generated.README):
        assert results in page.read_text(), "run: python -m tests.kit.generated"
