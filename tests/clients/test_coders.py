"""Published coding agents under one agent id each, and the page of what that cost.

`make soak` walks with all of them, as `python -m tests.clients.coders` does.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from benchmarks.requests.targets import free_port
from tokenizers import Tokenizer

from keepwarm import config
from keepwarm.models.load import load
from tests.clients.coders.journeys import KINDS, Journey
from tests.clients.coders.model import FILE
from tests.clients.coders.page import ENDS, JOURNEY, clients, goes_on, page
from tests.clients.coders.programs import (
    ALONE,
    CODEX,
    EVERY,
    PATIENCE_S,
    PROGRAMS,
    QUIET,
    Place,
    install,
)
from tests.clients.coders.sessions import KINDS as SESSION_KINDS
from tests.clients.coders.sessions import KINDS_OF_SUBAGENTS, write_project
from tests.clients.coders.walk import Walk
from tests.clients.conftest import Recorder
from tests.kit.agent_model import N_CONTEXT, TOKENIZER
from tests.kit.generated import CLIENTS, CODERS, JOURNEYS, SESSIONS
from tests.kit.scripted import call, write_scripted
from tests.server.conftest import serve

NEW_SESSIONS = ("claude", "codex", "opencode", "qwen", "claude-node20")
SLACK = 16  # tokens that may be computed beside the new ones
FURTHER = 300  # tokens of a short question or of a tool's result; Qwen Code resumes with both
WORDS = re.compile(r"[A-Za-z]+")  # names in settings
COMPACT_IN_TIME = ("codex", "continue")  # if they are told the context
# Of a session in the same project; `docs/clients.md` says why.
OTHER_GOALS = {"qwen": 0.07, "claude-node20": 0.1}


@pytest.fixture(scope="module")
def results():
    return json.loads(CODERS.with_suffix(".json").read_text())


def test_the_pages_show_the_results(results):
    assert CODERS.with_suffix(".md").read_text() == page(results)
    travelled, begun = (json.loads(path.read_text()) for path in (JOURNEYS, SESSIONS))
    assert CLIENTS.read_text() == clients(CLIENTS.read_text(), travelled, begun)


def test_the_page_names_what_the_clients_were_told():
    """A setting that is not a client's own would change the figures."""
    told = [
        name
        for each in EVERY.values()
        for text in each.more_files.values()
        for name in WORDS.findall(text)
    ]
    assert told
    assert [name for name in (*told, *QUIET[:-1]) if name not in CLIENTS.read_text()] == []


def test_new_sessions_compute_what_is_new():
    """What is in the user's message cannot be moved."""
    begun = json.loads(SESSIONS.read_text())["clients"]
    assert [*begun] == [*NEW_SESSIONS]
    for name, client in begun.items():
        assert [*client["kinds"]] == [*SESSION_KINDS]
        for settings in client["kinds"].values():
            as_sent, default = settings.values()
            check_sessions(name, default)
            assert not as_sent["other"]["reordered"]
            assert ("second subagent" in default) == (client["name"] in KINDS_OF_SUBAGENTS)
            if name != "codex":  # what differs is in its message of the user
                assert default["other"]["reordered"]
                assert as_sent["other"]["computed"] > 0.15 * as_sent["other"]["prompt"]


def test_the_results_are_of_every_client(results):
    """Of the versions that are installed, with every step, and with the head where it belongs."""
    found = {name: client["version"] for name, client in results["clients"].items()}
    assert found == {name: program.version for name, program in PROGRAMS.items()}
    for client in results["clients"].values():
        assert all(step["keeps_head"] for step in client["steps"])


def test_the_journeys_are_of_every_client_and_template():
    """Of the versions that are installed; the goals are those of new sessions."""
    travelled = json.loads(JOURNEYS.read_text())["clients"]
    found = {name: client["version"] for name, client in travelled.items()}
    assert found == {name: each.version for name, each in EVERY.items()}
    for name, client in travelled.items():
        assert [*client["kinds"]] == [*KINDS]
        for steps in client["kinds"].values():
            check_journey(name, steps)


def check_journey(name, steps):
    """Later turns are warm, and a client goes on after an overflow, or the page says why not."""
    within = (steps[step] for step in ("turn 2", "resumed", "restarted"))
    assert name == "aider" or all(each["computed"] <= FURTHER for each in within)
    assert all(0 < steps[step]["computed"] < steps[step]["prompt"] for step in JOURNEY)
    if name in NEW_SESSIONS:
        check_sessions(name, steps)
    assert steps["overflow"]["refused"]
    assert goes_on(steps["overflow"]) == (name not in ENDS)
    if name in COMPACT_IN_TIME:
        assert goes_on(steps["told"])
        assert not steps["told"]["refused"]
        assert steps["told"]["asked"][-1]["prompt"] < steps["long"]["prompt"]


def check_sessions(name, steps):
    """The goals: 15 % of a new session in another project, 3 % in the same; 15 % of a subagent."""
    goals = {"other": 0.15, "same": OTHER_GOALS.get(name, 0.03), "second subagent": 0.15}
    for step, most in goals.items():
        cost = steps.get(step, {"computed": 0, "prompt": 0})
        assert cost["computed"] <= most * cost["prompt"]


@pytest.fixture(scope="module")
def folder():
    """Not in memory: the programs are a gigabyte, and Codex's sandbox has no such files."""
    if shutil.which("npm") is None:
        pytest.skip("needs `npm`")
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


@pytest.fixture(scope="module")
def programs(folder):
    """npm keeps what it has loaded."""
    return install(folder, EVERY.values())


CLIENTS_OF_NPM = ("claude", "codex", "opencode", "qwen")
LAUNCHED = "It is four indeed."
NOTES = "The oak has four leaves."
ANSWER = '{"ok": true}'
OUTPUT_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def plain_tokenizer():
    """The one for long prompts, without tokens of its own for calls, which are scripted."""
    described = json.loads(TOKENIZER.read_text())
    added = described["added_tokens"]
    described["added_tokens"] = [each for each in added if "tool_call" not in each["content"]]
    return Tokenizer.from_str(json.dumps(described))


@pytest.mark.soak
def test_codex_reads_a_file_before_it_answers_by_a_schema(folder):
    """The model calls a tool if the server lets it; with the format alone it never could."""
    place = folder / "codex"
    project, home = place / "project", place / "home"
    programs = install(place, [CODEX])
    project.mkdir()
    (project / FILE).write_text(NOTES)
    (project / "schema.json").write_text(json.dumps(OUTPUT_SCHEMA))
    answers = [call(CODEX.tool, **CODEX.call(project)), ANSWER]
    options = {"n_context": N_CONTEXT, "tokenizer": plain_tokenizer(), "under_grammar": True}
    settings = config.load({"KEEPWARM_HOME": str(place / "keepwarm")})
    model = load(str(write_scripted(place / "model", answers, **options)), settings)
    asks = (*CODEX.ask, "--output-schema", "schema.json", "-o", "last.txt", "Is it four?")
    seen = []
    with serve(model, settings, around=lambda app: app.add_middleware(Recorder, seen=seen)) as live:
        CODEX.run(Place(live.url, programs, project, home), "", asks)
    asked = [str(each.json) for each in seen if each.path == "/v1/responses"]
    assert [NOTES in each for each in asked] == [False, True]
    assert (project / "last.txt").read_text() == ANSWER


@pytest.mark.soak
@pytest.mark.parametrize("name", CLIENTS_OF_NPM)
def test_launch_starts_a_server_and_a_published_client_and_leaves_nothing(folder, name):
    """As printed, with the model of a test; its answer reaches the client's standard output."""
    program, place = EVERY[name], folder / f"launched-{name}"
    programs = install(folder / "programs", [program])
    model = write_scripted(
        place / "model", [LAUNCHED], n_context=N_CONTEXT, tokenizer=plain_tokenizer()
    )
    project = write_project(place / "project")
    port = str(free_port())
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(place)}
    environ |= {"KEEPWARM_HOME": str(place / "home"), "KEEPWARM_PORT": port}
    command = (sys.executable, "-m", "keepwarm", "launch", name, "--model", str(model), "--")
    ended = subprocess.run(
        [*command, *program.ask, "Is it four?"],
        cwd=project,
        env=ALONE | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert LAUNCHED in ended.stdout
    assert (place / "home" / f"launch-{port}.log").read_text().count("Serving ") == 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))


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


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EVERY)
def test_a_journey(programs, name, kind):
    with tempfile.TemporaryDirectory() as folder:
        check_journey(name, Journey(EVERY[name], programs, Path(folder), KINDS[kind]).run())


LISTS, EXPLAINS = "mcp__keepwarm__list_agents", "mcp__keepwarm__explain_last_miss"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "added", "calls", "answer"),
    [
        (
            "claude",
            ("mcp", "add", "--transport", "http", "keepwarm", "{url}/mcp"),
            {"ToolSearch": {"query": f"select:{LISTS},{EXPLAINS}", "max_results": 5}},
            LISTS,
        ),
        ("codex", ("mcp", "add", "keepwarm", "--url", "{url}/mcp"), {LISTS: {}}, '"agents": []'),
    ],
)
def test_our_tools_are_found_over_mcp(watching, programs, name, added, calls, answer):
    """As `docs/clients.md` adds them. Claude Code finds them by its search, Codex calls one."""
    program = EVERY[name]
    with tempfile.TemporaryDirectory() as folder, watching(calls, mcp="on") as watched:
        project = write_project(Path(folder, "project"))
        place = Place(watched.url, programs, project, Path(folder, "home"))
        program.run(place, "", [part.format(url=watched.url) for part in added])
        program.run(place, "", (*program.ask, "Which agents are there?"))
        *_, last = watched.turns()
    assert {LISTS, EXPLAINS} <= {tool["function"]["name"] for tool in last.asked.request.tools}
    results = [m["content"] for m in last.asked.request.messages if m["role"] == "tool"]
    assert answer in str(results[-1])
