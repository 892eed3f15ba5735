"""Published coding agents under one agent id each, and the page of what that cost.

`make soak` walks with all of them, as `python -m tests.clients.coders` does.
"""

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.clients.coders.page import clients, page
from tests.clients.coders.programs import PROGRAMS, install
from tests.clients.coders.walk import Walk
from tests.kit.generated import CLIENTS, CODERS, SESSIONS

NEW_SESSIONS = ("claude", "opencode", "qwen")
SLACK = 16  # tokens that may be computed beside the new ones


@pytest.fixture(scope="module")
def results():
    return json.loads(CODERS.with_suffix(".json").read_text())


def test_the_pages_show_the_results(results):
    assert CODERS.with_suffix(".md").read_text() == page(results)
    begun = json.loads(SESSIONS.read_text())
    assert CLIENTS.read_text() == clients(CLIENTS.read_text(), results, begun)


def test_new_sessions_compute_what_is_new():
    """The goal: at most 15 % in another project; what is in the user's message cannot be moved."""
    begun = json.loads(SESSIONS.read_text())["clients"]
    assert [*begun] == [*NEW_SESSIONS]
    for client in begun.values():
        for settings in client["kinds"].values():
            before, now = (costs["other"] for costs in settings.values())
            assert now["computed"] <= 0.15 * now["prompt"] < before["computed"]
            assert now["reordered"]
            assert not before["reordered"]


def test_the_results_are_of_every_client(results):
    """Of the versions that are installed, with every step, and with the head where it belongs."""
    found = {name: client["version"] for name, client in results["clients"].items()}
    assert found == {name: program.version for name, program in PROGRAMS.items()}
    for client in results["clients"].values():
        assert all(step["keeps_head"] for step in client["steps"])


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """They are a gigabyte, too much for files in memory; npm keeps what it has loaded."""
    if shutil.which("npm") is None:
        pytest.skip("needs `npm`")
    with tempfile.TemporaryDirectory() as place:
        yield install(Path(place))


@pytest.mark.soak
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_head_stays_the_conversation(programs, name):
    """Through side requests, kills, rewinds, forks and compaction; further turns stay warm."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Walk(PROGRAMS[name], programs, Path(folder)).run()
    assert [step.name for step in steps if not step.keeps_head] == []
    further = [(step.name, cost) for step in steps for cost in step.costs if cost.n_new is not None]
    assert len(further) >= 8
    assert [name for name, cost in further if cost.asked.computed > cost.n_new + SLACK] == []
