"""Two servers asked in turn; engines in this process stand for them."""

from dataclasses import replace

import pytest
from benchmarks.requests.run import QUICK
from benchmarks.requests.suite import run_factory
from benchmarks.requests.targets import InProcess
from benchmarks.requests.workloads.turns import RESTARTED, after_restart, long_conversation
from benchmarks.servers import agents, ratios, restart, streams, turns

from benchmarks import servers
from tests.kit.checkpoints import write_checkpoint

SIZES = replace(QUICK, samples=2, turns=2)


class Noted(InProcess):
    """Notes who was asked."""

    def __init__(self, name, model, folder, asked):
        super().__init__(name, model, folder / name)
        self._asked = asked

    def ask(self, ask):
        if ask.policy is None:
            self._asked.append(self.name)
        return super().ask(ask)


@pytest.fixture
def asked():
    return []


@pytest.fixture
def runs(tmp_path, asked):
    model = write_checkpoint(tmp_path / "model", n_context=4096)
    make_run = run_factory(model, tmp_path, SIZES)
    targets = [Noted(name, model, tmp_path, asked) for name in ("keepwarm", "mlx-lm")]
    yield [make_run("servers", target, lambda _: None) for target in targets]
    for target in targets:
        target.close()


def test_each_is_first_as_often_as_the_other(runs, asked):
    found = turns(runs)
    assert list(found) == ["turn 1", "turn 2", "whole conversation"]
    assert all(len(samples) == 2 for each in found.values() for samples in each.values())
    ours, theirs = "keepwarm", "mlx-lm"
    assert asked == [ours, theirs, theirs, ours, theirs, ours, ours, theirs]


def test_a_conversation_is_warm_after_a_restart(runs):
    run = runs[0]
    run.target.start()
    messages = long_conversation(run)
    assert sum(len(each["content"]) for each in messages) >= SIZES.restarted
    reply = after_restart(run, messages)
    assert reply.cached_tokens == reply.prompt_tokens - 1


def test_both_are_restarted_at_once_and_later(runs, asked):
    found = restart(runs)
    assert list(found) == [RESTARTED, "the same, later"]
    assert all(len(samples) == 2 for each in found.values() for samples in each.values())
    assert asked == ["keepwarm"] * 2 + ["mlx-lm"] * 2 + ["keepwarm", "mlx-lm"] * 4


def test_ratios_are_those_of_samples_taken_together():
    assert ratios({"keepwarm": [1.0, 6.0], "mlx-lm": [2.0, 3.0]}) == [0.5, 2.0]


def test_a_cold_prompt_is_measured_beside_streams_of_the_same_server(runs, monkeypatch):
    monkeypatch.setattr(servers, "ENDLESS", 2000)
    runs = [replace(run, sizes=replace(run.sizes, samples=1, streams=(2,))) for run in runs]
    found = streams(runs)
    names = {"2 answers together", "256 cold, alone", "256 cold, beside 4"}
    assert found.keys() == names | {"their gaps, p50", "their gaps, p95"}
    assert all(len(ratios(seconds)) == 1 for seconds in found.values())
    p50, p95 = found["their gaps, p50"]["keepwarm"], found["their gaps, p95"]["keepwarm"]
    assert 0 < p50[0] <= p95[0]


def test_agents_ask_at_once_and_the_last_one_counts(runs, asked):
    runs = [replace(run, sizes=replace(run.sizes, samples=1)) for run in runs]
    (seconds,) = agents(runs).values()
    assert len(ratios(seconds)) == 1
    each = [SIZES.n_agents * [run.target.name] for run in runs]
    assert asked == [*each[0], *each[1], *each[1], *each[0]]
