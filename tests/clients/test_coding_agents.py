"""Published coding agents against a running server: `make soak`.

They are installed from the npm registry into a directory that goes again, and find a home of their
own. Each is asked twice in one conversation and reads a file in between.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

NOTE = "Four leaves of the tree are kept warm."
PATIENCE_S = 300


@dataclass(frozen=True)
class Agent:
    """How a client is asked, how it is asked once more, and how it reads a file."""

    name: str
    package: str
    ask: tuple[str, ...]
    ask_again: tuple[str, ...]
    tool: str
    argument: str
    value: str = "{workspace}/notes.txt"

    def calls(self, workspace):
        return {self.tool: {self.argument: self.value.format(workspace=workspace)}}


CLAUDE = Agent(
    "claude",
    "@anthropic-ai/claude-code@2.1.325",
    ("-p",),
    ("-p", "--continue"),
    "Read",
    "file_path",
)
CODEX = Agent(
    "codex",
    "@openai/codex@0.166.0",
    ("exec", "--skip-git-repo-check"),
    ("exec", "resume", "--last", "--skip-git-repo-check"),
    "exec_command",
    "cmd",
    "cat notes.txt",
)
OPENCODE = Agent(
    "opencode",
    "opencode-ai@1.18.18",
    ("run",),
    ("run", "--continue"),
    "read",
    "filePath",
)
AGENTS = (CLAUDE, CODEX, OPENCODE)


@pytest.fixture(scope="module")
def programs():
    """Where the clients lie; they are a gigabyte, too much for files in memory."""
    if shutil.which("npm") is None:
        pytest.skip("needs `npm`")
    with tempfile.TemporaryDirectory() as place:
        options = ("--prefix", place, "--cache", f"{place}/cache", "--no-audit", "--no-fund")
        packages = [agent.package for agent in AGENTS]
        subprocess.run(["npm", "install", *options, *packages], check=True, capture_output=True)
        yield Path(place, "node_modules", ".bin")


@pytest.fixture
def workspace():
    """A project on a disk: Codex runs commands in a sandbox that has no files in memory.

    It is a repository: outside of one opencode looks for settings in every folder above.
    """
    with tempfile.TemporaryDirectory() as place:
        project = Path(place, "project")
        project.mkdir()
        subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
        (project / "notes.txt").write_text(NOTE + "\n")
        yield project


def run(agent, arguments, url, programs, workspace):
    """Start a client as `keepwarm launch` does, in a home where it was never before."""
    home = workspace.parent / "home"
    home.mkdir(exist_ok=True)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home)}
    launch = (sys.executable, "-m", "keepwarm", "launch", agent.name, "--url", url, "--run", "--")
    ended = subprocess.run(
        [*launch, *arguments],
        cwd=workspace,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_two_turns_with_a_tool_call(watching, programs, workspace, agent):
    """The file is read, and from the second request on only what is new is computed."""
    with watching(agent.calls(workspace)) as watched:
        ask = (*agent.ask, "What do the notes say?")
        ask_again = (*agent.ask_again, "And what else?")
        first = run(agent, ask, watched.url, programs, workspace)
        second = run(agent, ask_again, watched.url, programs, workspace)
        turns = watched.turns()
    assert watched.refused == []
    assert len(turns) == 3
    result = next(m for m in turns[1].asked.request.messages if m["role"] == "tool")
    assert NOTE in result["content"]
    said = [m["content"] for m in turns[2].asked.request.messages if m["role"] == "assistant"]
    assert str(said[-1]).strip(" .") in first
    assert second.strip()
    assert all(turn.is_warm for turn in turns[1:])
    assert all(turn.n_new < turn.asked.n_tokens / 50 for turn in turns[1:])
    assert len({turn.asked.request.agent for turn in turns}) == 1


LISTS, EXPLAINS = "mcp__keepwarm__list_agents", "mcp__keepwarm__explain_last_miss"


@pytest.mark.parametrize(
    ("agent", "added", "calls", "answer"),
    [
        (
            CLAUDE,
            ("mcp", "add", "--transport", "http", "keepwarm", "{url}/mcp"),
            {"ToolSearch": {"query": f"select:{LISTS},{EXPLAINS}", "max_results": 5}},
            LISTS,
        ),
        (CODEX, ("mcp", "add", "keepwarm", "--url", "{url}/mcp"), {LISTS: {}}, '"agents": []'),
    ],
    ids=("claude", "codex"),
)
def test_our_tools_over_mcp(watching, programs, workspace, agent, added, calls, answer):
    """As `docs/mcp.md` adds them. Claude Code finds them by its search, Codex calls one."""
    with watching(calls, mcp="on") as watched:
        command = [part.format(url=watched.url) for part in added]
        run(agent, command, watched.url, programs, workspace)
        run(agent, (*agent.ask, "Which agents are there?"), watched.url, programs, workspace)
        *_, last = watched.turns()
    assert {LISTS, EXPLAINS} <= {tool["function"]["name"] for tool in last.asked.request.tools}
    results = [m["content"] for m in last.asked.request.messages if m["role"] == "tool"]
    assert answer in str(results[-1])


def test_a_tool_that_is_found_later_leaves_the_beginning_as_it_was(watching, programs, workspace):
    """Claude Code searches for a tool of its own; only its definition is new."""
    calls = {"ToolSearch": {"query": "select:WebFetch", "max_results": 5}}
    with watching(calls) as watched:
        run(CLAUDE, (*CLAUDE.ask, "What is on that page?"), watched.url, programs, workspace)
        first, second = watched.turns()
    assert watched.refused == []
    tools = [len(turn.asked.request.tools) for turn in (first, second)]
    assert tools[1] > tools[0]
    assert second.is_warm
    assert second.n_new < second.asked.n_tokens / 10
