"""The day of a coding agent: what is sent in which order, and what is made of the records."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace

import mlx.core as mx
import psutil
import pytest
from benchmarks.day import script
from benchmarks.day.__main__ import Plan, measure
from benchmarks.day.cold import judge, sample_positions
from benchmarks.day.figures import goals, percentile
from benchmarks.day.hosts import (
    CUT,
    Host,
    HourSample,
    RequestRecord,
    expected_records,
    reworded,
    run,
)
from benchmarks.day.model import Tokens, with_tools
from benchmarks.day.page import tables
from benchmarks.day.script import Day, DayRequest
from benchmarks.requests.client import ReplyToken, TimedReply
from benchmarks.requests.files import ROOT, kv_bytes_per_token
from benchmarks.requests.prompts import PromptGenerator, assistant, system, user

from keepwarm.errors import BadInput, Unreachable
from tests.kit import generated
from tests.kit.agent_model import TOKENIZER
from tests.kit.checkpoints import write_checkpoint

SCALE = 16


@pytest.fixture(scope="module")
def prompts():
    return PromptGenerator(TOKENIZER.parent)


@pytest.fixture(scope="module")
def steps(prompts):
    return list(Day(prompts, scale=SCALE).steps())


def requests_of(steps):
    return [request for step in steps for request in step.requests]


def test_a_whole_day_has_all_that_it_should(steps):
    requests = requests_of(steps)
    kinds = Counter(request.kind for request in requests)
    mine = [each for each in requests if each.person == 1 and not each.session.startswith("sub")]
    assert len(mine) - 2 - kinds[script.COMPACT] == 60, "without two titles"
    assert kinds[script.TITLED] == kinds[script.BEGIN] == 3
    assert (kinds[script.SUB_BEGIN], kinds[script.SUB_TURN]) == (6, 12)
    assert kinds[script.COMPACT] == kinds[script.COMPACTED_TURN] == kinds[script.RETURN] == 1
    assert {each.session for each in mine} == {"first", "other"}


@pytest.mark.parametrize("n_turns", [script.LEAST_TURNS, 60])
def test_three_restarts_and_a_kill_in_the_middle_of_conversations(prompts, n_turns):
    steps = list(Day(prompts, n_turns, scale=256).steps())
    events = [step.event for step in steps if step.event]
    assert events == [script.RESTART, script.KILL, script.RESTART, script.CAP]
    after = [request for step in steps if step.event for request in step.requests]
    assert {request.kind for request in after} == {"after a restart", "after kill -9"}
    assert all(len(request.messages) > 2 for request in after if request.person == 1)
    assert Counter(r.kind for r in requests_of(steps))[script.COMPACT] == 1


def test_the_second_person_comes_at_noon_and_asks_at_the_same_moment(steps):
    with_her = [step for step in steps if any(each.person == 2 for each in step.requests)]
    assert with_her[0].hour == 12
    assert all(len(step.requests) == 2 for step in with_her[1:])
    assert [step.hour for step in steps] == sorted(step.hour for step in steps)
    assert {step.hour for step in steps} == set(script.HOURS)


def test_lengths_are_those_of_a_day(prompts):
    """28 k tokens before the first question, compaction at 128 k."""
    first, *_, last = _turns_before_compaction(list(Day(prompts).steps()))
    assert _n_tokens(first, prompts) == pytest.approx(28_000 + 3_700, rel=0.05)
    assert _n_tokens(last, prompts) == pytest.approx(script.COMPACTED, rel=0.05)


def _turns_before_compaction(steps):
    requests = requests_of(steps)
    end = next(n for n, each in enumerate(requests) if each.kind == script.COMPACT)
    return [each for each in requests[:end] if each.session == "first" and each.tools]


def _n_tokens(request, prompts):
    calls = [call["function"] for m in request.messages for call in m.get("tool_calls", ())]
    texts = [*(m["content"] for m in request.messages), *(call["arguments"] for call in calls)]
    return sum(prompts.count(text) for text in [*texts, *map(str, request.tools)])


def test_history_only_grows_and_results_belong_to_calls(steps):
    for one, other in pairwise(_turns_before_compaction(steps)):
        assert other.messages[: len(one.messages)] == one.messages
        said, read = other.messages[len(one.messages) :]
        ids = [call["id"] for call in said.get("tool_calls", ())]
        assert ids == ([read["tool_call_id"]] if read["role"] == "tool" else [])


def test_two_days_are_the_same(prompts, steps):
    assert list(Day(prompts, scale=SCALE).steps()) == steps


def test_new_tokens_are_those_behind_any_prompt_before(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    model = with_tools(source, tmp_path / "model", 9_000)
    assert "tools" in (model / "tokenizer_config.json").read_text()
    tokens = Tokens(model)
    tool = {"type": "function", "function": {"name": "read", "description": "Reads."}}
    first = DayRequest("turn", 1, "one", [system("The fox."), user("The dog sleeps.")], [tool])
    n_first, new = tokens.count(first)
    assert new == n_first
    answered = [*first.messages, assistant("It does."), user("And the tree?")]
    n_second, new = tokens.count(replace(first, messages=answered))
    assert new == n_second - n_first, "the prompt ends where the answer begins"
    n_other, as_many = tokens.count(reworded(replace(first, messages=answered)))
    added = n_other - n_second
    assert (as_many, 0 < added < 8) == (new + added, True), "the beginning is known"


def test_an_answer_differs_unless_the_cold_run_was_undecided():
    sure, unsure = ReplyToken("ab", 2.0), ReplyToken("cd", 0.0001)
    assert judge("abcd", "abcd", [sure, unsure], 1e-3) == "same"
    assert judge("abxy", "abcd", [sure, unsure], 1e-3) == "tie"
    assert judge("xycd", "abcd", [sure, unsure], 1e-3) == "differs"
    assert judge("cdxy", "cdab", [unsure, sure], 1e-3) == "tie", "after a tie all may differ"


def test_samples_are_answers_that_reused_something():
    records = [
        RequestRecord(n, 9, kind, 1, "s", 9, 9, n_cached=n) for n, kind in enumerate("abbbb")
    ]
    assert sample_positions(records, ["text"] * 5, 2) == [1, 4]
    assert sample_positions(records, ["text"] * 4 + [""], 9) == [1, 2, 3]


def test_answers_after_a_restart_are_compared_first():
    kinds = ["a", "b", "after a restart", "c", "after kill -9", "d"]
    records = [RequestRecord(n, 9, kind, 1, "s", 9, 9, n_cached=1) for n, kind in enumerate(kinds)]
    assert sample_positions(records, ["text"] * 6, 2) == [2, 4]
    assert sample_positions(records, ["text"] * 6, 4) == [0, 1, 2, 4]


def test_bytes_are_held_against_what_was_computed():
    """What was new to the client but known to the server is not to be written again."""
    goal = goals(results([record(n_new=500)], reported_bytes=121))[4]
    assert (goal.found, goal.holds) == ("1.1 (121 B)", True)
    goal = goals(results([record(n_new=500)], reported_bytes=143))[4]
    assert (goal.found, goal.holds) == ("1.3 (143 B)", False)


def test_saves_that_were_lost_are_told():
    found = results([record()], reported_bytes=110)
    found["servers"]["keepwarm"]["lost_saves"] = 3
    assert goals(found)[4].found == "1 (110 B, 3 saves lost)"


@pytest.mark.parametrize(("event", "n_lost"), [(script.KILL, 5), (script.RESTART, 1)])
def test_what_is_queued_at_a_kill_is_lost(event, n_lost):
    server = StubServer()
    server.cache_stats = lambda: {"writes": {"dropped": 1, "queued_blocks": 4}}
    host = Host(server, [])
    host.start()
    host.end(event)
    assert host.lost_saves == n_lost


def test_ranks():
    assert [percentile(range(1, 101), percent) for percent in (50, 95, 100)] == [50, 95, 100]
    assert percentile([3.0], 95) == 3.0


def record(kind=script.TURN, **more):
    base = RequestRecord(0, 9, kind, 1, "s", 1000, 100, 1000, 900, n_answer=10, first_s=1.0)
    return replace(base, **more)


def results(ours, theirs=(), **more):
    hour = asdict(HourSample(9, 1000, 100, 5, 9, 0, 0))
    later = {**hour, "resident_bytes": more.pop("resident_bytes", 1000)}
    base = {
        "starts_s": [1.0],
        "events": [],
        "failure": "",
        "cap_bytes": 0,
        "hours": [hour, later],
        "written_bytes": 0,
        "reported_bytes": more.pop("reported_bytes", 1),
    }
    sent = {"keepwarm": ours, "mlx-lm": theirs}
    servers = {name: {**base, "requests": list(map(asdict, n))} for name, n in sent.items() if n}
    machine = {"backend": "cpu", "n_cpus": 2, "architecture": "aarch64", "load": [1.0]}
    head = {"command": "day", "date": "today", "model": "tiny", "scale": 8, "turns": 12}
    said = {"images": 0, "seconds": 1, "tie": 1e-3, "kv_bytes_per_token": 1, "machine": machine}
    return {**head, **said, "servers": servers, "cold": [{"verdict": "same"}], **more}


def held(found):
    return [goal.holds for goal in goals(found)]


def test_all_goals_hold_where_they_do():
    ours = [record(), record("after a restart", repeat_s=0.8)]
    theirs = [record(first_s=3.0), record(first_s=3.0)]
    found = results(ours, theirs, reported_bytes=264)
    assert held(found) == [True] * 8
    assert tables(found).count("| holds |") == 8


@pytest.mark.parametrize(
    ("position", "found"),
    [
        (0, results([record(n_cached=894)])),
        (1, results([record(n_cached=835), *[record(n_new=110)] * 9])),
        (2, results([record()], [record(first_s=2.8)])),
        (3, results([record(repeat_s=0.7)])),
        (4, results([record()], reported_bytes=133)),
        (5, results([record()], resident_bytes=1_200)),
        (6, results([record(error="It broke.")])),
        (7, results([record()], cold=[{"verdict": "same"}, {"verdict": "differs"}])),
    ],
)
def test_each_goal_alone_can_fail(position, found):
    assert [n for n, holds in enumerate(held(found)) if holds is False] == [position]


def test_what_was_not_measured_is_said():
    found = results([record()], cold=[], kv_bytes_per_token=None)
    assert [n for n, holds in enumerate(held(found)) if holds is None] == [2, 3, 4, 7]
    assert tables(found).count("| not measured |") == 4


def test_memory_of_a_gpu_is_no_part_of_a_process():
    found = results([record()], resident_bytes=1_200)
    assert held(found)[5] is False
    found["machine"]["backend"] = "cuda"
    assert held(found)[5] is None
    assert "what has budgets is on the GPU | ≤ 1.1 | not measured" in tables(found)


def test_a_run_that_was_cut_has_its_tables():
    cut = results([record(), record(first_s=9.0)], [record(first_s=4.0)], cold=[])
    cut["servers"]["keepwarm"]["hours"] = []
    assert [n for n, holds in enumerate(held(cut)) if holds is None] == [3, 5, 7]
    assert "0.25 (1.0 s, 4.0 s, 1 of 2 requests)" in tables(cut)


def test_what_failed_soon_is_no_short_wait():
    failed, title = record(error="It broke.", first_s=0.1), script.TITLED
    ours = [record(first_s=2.0), failed, record(title), record(title)]
    theirs = [record(first_s=8.0), record(first_s=8.0), replace(failed, kind=title)]
    shown = tables(results(ours, theirs))
    assert "| 0.25 (2.0 s, 8.0 s, 1 of 4 requests) |" in shown
    assert "| turn | keepwarm | 2 | 2.000 | 2.000 |" in shown
    assert "| title | mlx-lm | 1 |  |  |" in shown
    assert "| keepwarm | 4 | 4.0 |" in shown


@pytest.mark.parametrize("name", ["keepwarm", "mlx-lm"])
def test_a_server_that_never_started_is_in_the_tables(name):
    found = results([record()], [record(first_s=4.0)])
    never = {"requests": [], "hours": [], "starts_s": [], "failure": "It does not start."}
    found["servers"][name] |= never
    shown = tables(found)
    assert f"- {name}: It does not start." in shown
    assert shown.count("| turn |") == 1
    assert held(found)[2] is None
    assert held(found)[6] is (name == "mlx-lm")


def test_a_published_command_has_no_folders_of_the_machine(tmp_path):
    models = {str(ROOT / "benchmarks" / "models"): "benchmarks/models", "smollm2": "smollm2"}
    models[str(tmp_path / "mine")] = "mine"
    for given, published in models.items():
        plan = Plan(given, "", 8, 12, 4, False, [], [])
        assert plan.command.startswith(f"python -m benchmarks.day --model {published} --scale")


def test_a_tree_without_tests_has_its_day():
    code = "import sys; sys.modules['tests'] = None; import benchmarks.day.__main__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_page_is_current():
    page = generated.DAY.read_text()
    assert generated.day(page) == page, "run: python -m tests.kit.generated"


class StubProcess:
    """Ends at any signal."""

    def __init__(self, calls):
        self._calls = calls
        self._ended = False

    def send_signal(self, how):
        self._calls.append(how.name)
        self._ended = True

    def status(self):
        return psutil.STATUS_ZOMBIE if self._ended else psutil.STATUS_RUNNING

    def io_counters(self):
        return SimpleNamespace(write_bytes=7)

    def children(self, **_):
        return []

    def memory_info(self):
        return SimpleNamespace(rss=1)

    def num_threads(self):
        return 1

    num_fds = num_threads


class StubServer:
    """Notes what is done to it; from `n_starts` on it does not start."""

    name, about, store, is_ours = "stub", "", None, False

    def __init__(self, n_starts=99):
        self.calls = []
        self._left = n_starts

    def start(self):
        if not self._left:
            raise Unreachable("It does not start.")
        self._left -= 1
        self.calls.append("start")
        self.process = StubProcess(self.calls)
        return 1.0

    def ask(self, ask):
        self.calls.append("ask")
        if ask.messages[-1]["content"] == "break":
            raise Unreachable("No answer.")
        return TimedReply("text", (0.5,), 1.0, 10, 4, 1, {})

    def kill(self):
        """Only reaps: the process has ended."""

    def close(self):
        self.calls.append("close")

    def cache_stats(self):
        return {}

    held_bytes = cache_stats

    def buffer_bytes(self):
        return 3


class CountNothing:
    def count(self, request):
        return 10, 6


def run_day(server, *steps, show=lambda _: None):
    host = Host(server, [], pause_s=0.0)
    run([host], steps, expected_records(steps, CountNothing()), show)
    return host


def step(hour=9, event="", text="Hi"):
    return script.Step(hour, [DayRequest("turn", 1, "one", [user(text)])], event)


def test_a_server_is_killed_at_once_after_an_answer_and_started_for_the_next():
    server = StubServer()
    host = run_day(server, step(), step(event=script.KILL), step(10, script.RESTART))
    asked = ["start", "ask"]
    assert server.calls == [*asked, "SIGKILL", *asked, "SIGTERM", *asked, "SIGTERM"]
    assert host.events == [script.KILL, script.RESTART]
    assert [sample.hour for sample in host.hours] == [9, 10]
    assert {sample.buffer_bytes for sample in host.hours} == {3}
    assert host.written_bytes == 3 * 7


def test_what_a_machine_compiles_once_is_no_part_of_the_day():
    server = StubServer()
    Host(server, []).compile_kernels(["one", "two"])
    assert server.calls == ["start", "ask", "ask", "ask", "close"]
    broken = StubServer()
    Host(broken, []).compile_kernels(["break", "two"])
    assert broken.calls == ["start", "ask", "close"], "the day says what it fails at"


def test_an_error_is_noted_and_the_day_goes_on():
    host = run_day(StubServer(), step(text="break"), step())
    assert [record.error for record in host.records] == ["No answer.", ""]
    assert [record.n_computed for record in host.records] == [0, 6]


def test_a_server_that_does_not_start_again_has_no_further_part():
    shown = []
    steps = (step(), step(event=script.RESTART), step())
    host = run_day(StubServer(n_starts=1), *steps, show=shown.append)
    assert (host.failure, len(host.records)) == ("It does not start.", 1)
    assert shown == [
        "1 of 3, 9:00, stub: turn 0.50 s, 6 computed, 6 new of 10",
        "2 of 3, 9:00, stub: It does not start.",
    ]


def test_a_day_in_segments_is_the_day():
    """Each run ends where the servers end anyway, and the next one knows all that came before."""
    day = [step(), step(event=script.KILL), step(), step(10, script.RESTART)]
    whole, server, state, asked = run_day(StubServer(), *day), StubServer(), None, []
    for _ in range(3):
        host = Host(server, [], pause_s=0.0)
        if state is not None:
            host.resume(json.loads(json.dumps(state)))
        n_run = run([host], day, expected_records(day, CountNothing()), lambda _: None, 1)
        asked.append((n_run, host.n_steps))
        state = host.as_state()
    assert asked == [(1, 1), (1, 3), (1, 4)]
    assert server.calls == whole.server.calls
    assert host.as_state() == whole.as_state()


def test_a_run_that_was_cut_goes_on_and_says_so():
    day = [step(), step(), step()]
    expected = expected_records(day, CountNothing())
    first, second = (Host(StubServer(), [], pause_s=0.0) for _ in range(2))

    def cut(_):
        if first.n_steps == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([first], day, expected, cut)
    second.resume(first.as_state())
    run([second], day, expected, lambda _: None)
    assert second.server.calls == ["start", "ask", "SIGTERM"]
    assert len(second.records) == len(second.texts) == 3
    assert second.events == [CUT]
    found = results([record()])
    assert held(found)[4] is True
    found["servers"]["keepwarm"]["events"] = [CUT]
    assert held(found)[4] is None, "what the killed process wrote is not known"


def test_the_cap_of_the_disk_is_kept_between_runs():
    host = Host(StubServer(), [])
    host.server.environ = {}
    host.resume({**host.as_state(), "cap_bytes": 5})
    assert host.server.environ == {"KEEPWARM_DISK_BYTES": "5"}


def test_another_day_in_the_same_folder_is_refused(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"command": "another"}))
    with pytest.raises(BadInput, match="another day"):
        measure(Plan("any", "", 8, 12, 4, False, [], []), lambda _: None, tmp_path)


@pytest.mark.parametrize(
    ("config", "n_layers"),
    [({}, 8), ({"sliding_window": 4}, 8), ({"full_attention_interval": 4}, 2)],
)
def test_bytes_of_keys_and_values_of_a_token(tmp_path, config, n_layers):
    rows = {
        "model_type": "any",
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        **config,
    }
    (tmp_path / "config.json").write_text(json.dumps(rows))
    n_bytes = 2 if mx.default_device() == mx.gpu else 4
    assert kv_bytes_per_token(tmp_path) == 2 * n_layers * 2 * 16 * n_bytes
