"""Two servers asked in turn; engines in this process stand for them."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.requests.files import ROOT
from benchmarks.requests.run import QUICK
from benchmarks.requests.suite import run_factory
from benchmarks.requests.targets import InProcess
from benchmarks.requests.workloads import streams as workloads
from benchmarks.requests.workloads.turns import RESTARTED, after_restart, long_conversation
from benchmarks.servers import CHANGED, agents, collected, faults, ratios, restart, streams, turns

from benchmarks import servers
from keepwarm.device import kernels
from keepwarm.errors import Unreachable
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


class Failing:
    """Starts, and answers nothing."""

    is_ours = False

    def __init__(self, name, target):
        self.name, self.start, self.kill = name, target.start, target.kill

    def ask(self, ask):
        raise Unreachable("it died")


class Changed:
    """Notes what it was started with. `fails`: by the environment and the machine's file."""

    is_ours, name = True, "keepwarm"

    def __init__(self, home, fails):
        self.environ, self.started, self.policies = {"KEEPWARM_HOME": str(home)}, [], set()
        self._fails = fails

    def start(self):
        home = Path(self.environ["KEEPWARM_HOME"])
        self.started.append((self.environ, json.loads((home / "machine.json").read_text())))

    def ask(self, ask):
        self.policies.add((len(self.started), ask.policy))
        if self._fails(*self.started[-1]):
            raise Unreachable("an illegal memory access was encountered")
        return SimpleNamespace(ttft_s=1.0)

    def kill(self):
        self.started[-1] += ("killed",)


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


def all_of(samples):
    """What is known in the end."""
    *_, found = collected(samples)
    return found


def test_each_is_first_as_often_as_the_other(runs, asked):
    found = all_of(turns(runs))
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
    found = all_of(restart(runs))
    assert list(found) == [RESTARTED, "the same, later"]
    assert all(len(samples) == 2 for each in found.values() for samples in each.values())
    assert asked == ["keepwarm"] * 2 + ["mlx-lm"] * 2 + ["keepwarm", "mlx-lm"] * 4


def test_ratios_are_those_of_samples_taken_together():
    assert ratios({"keepwarm": [1.0, 6.0], "mlx-lm": [2.0, 3.0]}) == [0.5, 2.0]


def test_a_cold_prompt_is_measured_beside_streams_of_the_same_server(runs, monkeypatch):
    monkeypatch.setattr(workloads, "ENDLESS", 2000)
    runs = [replace(run, sizes=replace(run.sizes, samples=1, streams=(2,))) for run in runs]
    found = all_of(streams(runs))
    names = {"2 answers together", "256 cold, alone", "256 cold, beside 4"}
    assert found.keys() == names | {"their gaps, p50", "their gaps, p95"}
    assert all(len(ratios(seconds)) == 1 for seconds in found.values())
    p50, p95 = found["their gaps, p50"]["keepwarm"], found["their gaps, p95"]["keepwarm"]
    assert 0 < p50[0] <= p95[0]


def test_agents_ask_at_once_and_the_last_one_counts(runs, asked):
    runs = [replace(run, sizes=replace(run.sizes, samples=1)) for run in runs]
    _, seconds = all_of(agents(runs)).values()
    assert len(ratios(seconds)) == 1
    assert asked == [run.target.name for run in runs for _ in range(2 * SIZES.n_agents)]


def test_a_run_that_is_cut_has_every_sample_so_far(runs, asked, capsys):
    """The first server's rounds are known before the second is asked."""
    samples = collected(agents(runs))
    found = next(samples)
    assert list(found) == ["last of 3 agents, at first"]
    assert asked == ["keepwarm"] * SIZES.n_agents
    assert "last of 3 agents, at first" in capsys.readouterr().out


def test_what_is_kept_names_the_model(tmp_path, monkeypatch):
    def measure(names, *_):
        yield names[0], {"turn 1": {"keepwarm": [1.0]}}

    file, model = tmp_path / "found.json", ROOT / "benchmarks" / "models" / "window"
    command = ["servers", "turns", "--model", str(model), "--samples", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(servers, "measure", measure)
    servers.main()
    kept = json.loads(file.read_text())
    published = "python -m benchmarks.servers turns --model benchmarks/models/window --samples 1"
    assert kept["command"] == published
    assert kept["seconds"] == {"turns": {"turn 1": {"keepwarm": [1.0]}}}


def test_agents_of_a_server_that_fails_have_no_seconds(runs, capsys):
    ours, other = (replace(run, sizes=replace(run.sizes, samples=1)) for run in runs)
    failing = Failing("mlx-lm", other.target)
    _, seconds = all_of(agents([ours, replace(other, target=failing)])).values()
    assert [len(samples) for samples in seconds.values()] == [1, 0]
    assert ratios(seconds) == []
    assert "it died" in capsys.readouterr().out


@pytest.fixture
def looked_for(runs, tmp_path, monkeypatch):
    """Of a server that fails so: what lived, by what was changed; and the server."""
    names = {"4 to 4": {"3": "keepwarm_alike"}}
    known = {"blas": 1, "products": {"depends": 3, "names": names}}
    (tmp_path / "machine.json").write_text(json.dumps(known))
    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path))

    def look(fails):
        target = Changed(tmp_path, fails)
        found = all_of(faults([replace(runs[0], target=target, sizes=replace(SIZES, samples=1))]))
        assert target.environ == {"KEEPWARM_HOME": str(tmp_path)}
        assert all("killed" in each for each in target.started)
        lived = {what.partition(", ")[2]: len(by["keepwarm"]) == 2 for what, by in found.items()}
        return lived, target

    return look


def has_kernels(machine):
    return "keepwarm_alike" in str(machine["products"])


def test_a_server_that_lives_is_given_many_shapes(looked_for):
    lived, target = looked_for(lambda environ, _: kernels.CHECK in environ)
    assert lived == {"as it is": True, "MLX fails at many shapes": False}
    assert [has_kernels(machine) for _, machine, _ in target.started] == [True, False]


def test_a_fault_of_our_kernels_is_found(looked_for, capsys):
    lived, target = looked_for(lambda _, machine: has_kernels(machine))
    assert lived == {"as it is": False, "none of our kernels": True}
    assert "as it is: failed: an illegal memory" in capsys.readouterr().out
    plain = {"blas": 1, "products": {"depends": 3, "names": {"4 to 4": {"3": "plain"}}}}
    assert target.started[1][1] == plain


def test_another_fault_is_looked_for_with_one_thing_changed_at_a_time(looked_for):
    lived, target = looked_for(lambda environ, _: "MLX_USE_CUDA_GRAPHS" not in environ)
    assert list(lived) == [
        "as it is", "none of our kernels", *(variant.what for variant in CHANGED)
    ]  # fmt: skip
    assert [what for what, lives in lived.items() if lives] == ["no CUDA graphs"]
    changed = [environ.items() - target.environ.items() for environ, *_ in target.started]
    assert [len(each) for each in changed] == [0, 1, 1, 2, 2, 2]  # each but the first has a home
    assert {number for number, policy in target.policies if policy == "no-store"} == {3}
