"""The published clients: where they are installed, how they are asked, what they answer."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_cache_path

from keepwarm.server.http.clients import CLIENTS, ServerInfo
from tests.clients.coders.model import FILE
from tests.clients.coders.page import NAMES
from tests.kit.agent_model import N_CONTEXT
from tests.kit.npm import npm_install

PATIENCE_S = 600
PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
SHOWN_URL = "http://127.0.0.1:8181"
BLOCK = re.compile(r"^```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOWHERE = "http://127.0.0.1:9"  # a proxy that is not there: a client reaches loopback alone
ALONE = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "PI_OFFLINE": "1",
    "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class Ended(AssertionError):
    """A client that ended with an error."""


class Place(NamedTuple):
    """Where a client runs, and the server it is pointed at."""

    url: str
    programs: Path
    project: Path
    home: Path
    n_context: int = N_CONTEXT
    model: str = ""  # with it a client is told `n_context`, else what the server says


@dataclass(frozen=True)
class Program:
    """One client. `{session}` in its arguments is the conversation it goes on with."""

    name: str
    package: str
    api: str  # of the agent's own path, in the dialect nearest to the client's
    ask: tuple[str, ...]
    resume: tuple[str, ...]
    fork: tuple[str, ...] = ()
    compact: tuple[str, ...] = ()
    in_one: tuple[str, ...] = ()  # takes questions line by line; others run a tool in between
    session_key: str = ""  # in the JSON it prints
    tool: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    own_file: str = ""  # in its home, as `docs/clients.md` shows it; else by `keepwarm launch`
    more_files: Mapping[str, str] = field(default_factory=dict)  # beside it: less is kept here
    compact_file: str = ""  # beside this one, with the length at which it compacts
    compact_variable: str = ""  # by which it finds a copy of it
    needs: str = ""  # a package without which it does not run
    is_told: bool = True  # by `keepwarm launch` or its file, how long the context is

    @property
    def version(self) -> str:
        return re.split("@|==", self.package)[-1]

    def call(self, project: Path) -> dict[str, str]:
        """The arguments with which it reads the file."""
        path = str(project / FILE)
        return {name: value.format(path=path) for name, value in self.arguments.items()}

    def compact_environ(self, model: Path, most: int, folder: Path) -> dict[str, str]:
        """Has it compact a conversation of more tokens than that."""
        if not self.compact_file:
            return {}
        config = Path(__file__).with_name(self.compact_file).read_text()
        copy = folder / self.compact_file
        copy.write_text(config.replace("MODEL", str(model)).replace('"MOST"', str(most)))
        return {self.compact_variable: str(copy)}

    def run(
        self,
        place: Place,
        agent: str,
        arguments: Sequence[str],
        environ: Mapping[str, str] | None = None,
        said: str = "",
    ) -> str:
        """Start it as a user would; the id of its conversation."""
        place.home.mkdir(exist_ok=True)
        own = {"PATH": f"{place.programs}:{os.environ['PATH']}", "HOME": str(place.home)}
        command, variables = self._started(place, agent)
        ended = subprocess.run(
            [*command, *arguments],
            cwd=place.project,
            env={**ALONE, **own, **variables, **(environ or {})},
            input=said,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if ended.returncode:
            raise Ended(f"{self.name} {arguments}: {ended.stdout}{ended.stderr}")
        return _find(_values(ended.stdout), self.session_key)

    def _started(self, place: Place, agent: str) -> tuple[Sequence[str], Mapping[str, str]]:
        """Its command and variables: by a file, by `keepwarm launch`, or as that would be."""
        if self.own_file:
            written, command = documented(self.name)
            for shown in (N_CONTEXT, N_CONTEXT // 4):
                written = written.replace(str(shown), str(place.n_context * shown // N_CONTEXT))
            files = {self.own_file: written.replace(SHOWN_URL, place.url), **self.more_files}
            for name, text in files.items():
                file = place.home / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            return shlex.split(command.replace("~", str(place.home))), {}
        if place.model:
            server = ServerInfo(place.url, place.model, place.n_context, agent=agent)
            setup = CLIENTS[self.name](server)
            for name, text in setup.files.items():
                (place.home / name).write_text(text)
            files = {name: str(place.home / name) for name in setup.files}
            return setup.command, {**setup.environ, **setup.secrets, **files}
        launch = (sys.executable, "-m", "keepwarm", "launch", self.name, "--url", place.url)
        return (*launch, *(("--agent", agent) if agent else ()), "--"), {}


def documented(name: str) -> list[str]:
    """The blocks of a client's section of `docs/clients.md`: its file, then its command."""
    _, _, section = PAGE.read_text().partition(f"\n## {NAMES[name]}\n")
    return BLOCK.findall(section.partition("\n## ")[0])


def _values(printed: str) -> list[Any]:
    """The JSON in what was printed: one object, or one in each line."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith(("{", "["))]


def _find(value: Any, key: str) -> str:
    """The first value of a key, however deep."""
    if isinstance(value, dict):
        if key in value:
            return str(value[key])
        value = list(value.values())
    found = (_find(each, key) for each in value) if isinstance(value, list) else ()
    return next(filter(None, found), "")


NODE = "node@22.23.3"  # for clients that need a newer one than Debian's
QUIET = ("--yes-always", "--no-fancy-input", "--no-auto-commits", "--no-gitignore", FILE)

CLAUDE = Program(
    name="claude",
    package="@anthropic-ai/claude-code@2.1.325",
    api="messages",
    ask=("-p", "--output-format", "json"),
    resume=("-p", "--output-format", "json", "--resume", "{session}"),
    fork=("-p", "--output-format", "json", "--resume", "{session}", "--fork-session"),
    compact=("-p", "--output-format", "json", "--resume", "{session}", "/compact"),
    session_key="session_id",
    tool="Read",
    arguments={"file_path": "{path}"},
)
CODEX = Program(
    name="codex",
    package="@openai/codex@0.166.0",
    api="chat/completions",
    ask=("exec", "--json", "--skip-git-repo-check"),
    resume=("exec", "--json", "--skip-git-repo-check", "resume", "{session}"),
    fork=("exec", "--json", "--skip-git-repo-check", "fork", "{session}"),
    compact=(
        *("exec", "--json", "--skip-git-repo-check", "-c", "model_auto_compact_token_limit=1000"),
        *("resume", "{session}", "What now?"),
    ),
    session_key="thread_id",
    tool="exec_command",
    arguments={"cmd": f"cat {FILE}"},
)
OPENCODE = Program(
    name="opencode",
    package="opencode-ai@1.18.18",
    api="chat/completions",
    ask=("run", "--format", "json"),
    resume=("run", "--format", "json", "--session", "{session}"),
    fork=("run", "--format", "json", "--session", "{session}", "--fork"),
    compact=("run", "--format", "json", "--session", "{session}", "What now?"),
    compact_file="opencode.json",
    compact_variable="OPENCODE_CONFIG",
    session_key="sessionID",
    tool="read",
    arguments={"filePath": "{path}"},
)
QWEN = Program(
    name="qwen",
    package="@qwen-code/qwen-code@0.24.4",
    api="chat/completions",
    ask=("-o", "json", "-p"),
    resume=("-o", "json", "--resume", "{session}", "-p"),
    session_key="session_id",
    tool="read_file",
    arguments={"file_path": "{path}"},
    needs=NODE,
)
CONTINUE = Program(
    name="continue",
    package="@continuedev/cli@1.5.47",
    api="chat/completions",
    ask=("-p",),
    resume=("-p", "--resume"),
    tool="Read",
    arguments={"filepath": "{path}"},
    own_file=".continue/config.yaml",
    needs=NODE,
)
PI = Program(
    name="pi",
    package="@earendil-works/pi-coding-agent@0.87.1",
    api="chat/completions",
    ask=("-p", "--mode", "json"),
    resume=("-p", "--mode", "json", "--continue"),
    tool="read",
    arguments={"path": "{path}"},
    own_file=".pi/agent/models.json",
    more_files={".pi/agent/settings.json": '{"compaction": {"keepRecentTokens": 1000}}'},
    needs=NODE,
)
AIDER = Program(
    name="aider",
    package="aider-chat==0.86.2",
    api="chat/completions",
    ask=(*QUIET, "--message"),
    resume=(*QUIET, "--restore-chat-history", "--message"),
    in_one=QUIET,
    is_told=False,
)
PROGRAMS = {program.name: program for program in (CLAUDE, CODEX, OPENCODE)}
EVERY = {each.name: each for each in (CLAUDE, CODEX, OPENCODE, QWEN, CONTINUE, PI, AIDER)}


def install(directory: Path, programs: Iterable[Program] = tuple(PROGRAMS.values())) -> Path:
    """Have npm and pip install what is not there yet; the folder of the programs."""
    if shutil.which("npm") is None:
        raise SystemExit("The clients are installed by npm, which is not on the PATH.")
    wanted = [package for each in programs for package in (each.package, each.needs) if package]
    missing = [package for package in wanted if not _is_installed(directory, package)]
    if of_npm := [package for package in missing if "==" not in package]:
        npm_install(directory, of_npm)
    folder = directory / "node_modules" / ".bin"
    for package in (package for package in missing if "==" in package):
        own = directory / package
        subprocess.run([sys.executable, "-m", "venv", str(own)], check=True)
        subprocess.run([own / "bin" / "pip", "install", "--quiet", package], check=True)
        name = package.partition("-")[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(own / "bin" / name)
    return folder


def _is_installed(directory: Path, package: str) -> bool:
    if "==" in package:
        return (directory / package).is_dir()
    name, _, version = package.rpartition("@")
    described = directory / "node_modules" / name / "package.json"
    return described.is_file() and json.loads(described.read_text())["version"] == version


def arguments(program: str, clients: Iterable[str]) -> argparse.Namespace:
    """The arguments of a program that runs these clients."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(clients)}; else all")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--programs",
        type=Path,
        default=user_cache_path("keepwarm-clients"),
        help="where npm installs the clients",
    )
    return parser.parse_args()
