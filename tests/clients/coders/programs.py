"""The published clients: where they are installed, how they are asked, what they answer."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_cache_path

from tests.clients.coders.model import FILE

PATIENCE_S = 180
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
}


class Place(NamedTuple):
    """Where a client runs, and the server it is pointed at."""

    url: str
    programs: Path
    project: Path
    home: Path


@dataclass(frozen=True)
class Program:
    """One client. `{session}` in its arguments is the conversation it goes on with."""

    name: str
    package: str
    api: str  # of the agent's own path, in the dialect nearest to the client's
    ask: tuple[str, ...]
    resume: tuple[str, ...]
    fork: tuple[str, ...]
    compact: tuple[str, ...]
    session_key: str  # in the JSON it prints
    tool: str
    arguments: Mapping[str, str]
    compact_file: str = ""  # beside this one, with the length at which it compacts
    compact_variable: str = ""  # by which it finds a copy of it
    needs: str = ""  # a package without which it does not run

    @property
    def version(self) -> str:
        return self.package.rpartition("@")[2]

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
    ) -> str:
        """Start it as `keepwarm launch` does; the id of its conversation."""
        place.home.mkdir(exist_ok=True)
        own = {"PATH": f"{place.programs}:{os.environ['PATH']}", "HOME": str(place.home)}
        launch = (sys.executable, "-m", "keepwarm", "launch", self.name, "--url", place.url)
        ended = subprocess.run(
            [*launch, *(("--agent", agent) if agent else ()), "--run", "--", *arguments],
            cwd=place.project,
            env={**ALONE, **own, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if ended.returncode:
            raise AssertionError(f"{self.name} {arguments}: {ended.stdout}{ended.stderr}")
        return _find(_values(ended.stdout), self.session_key)


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
    fork=(),
    compact=(),
    session_key="session_id",
    tool="read_file",
    arguments={"file_path": "{path}"},
    needs="node@22.23.3",
)
PROGRAMS = {program.name: program for program in (CLAUDE, CODEX, OPENCODE)}


def install(directory: Path, programs: Iterable[Program] = tuple(PROGRAMS.values())) -> Path:
    """Have npm install what is not there yet; the folder of the programs."""
    if shutil.which("npm") is None:
        raise SystemExit("The clients are installed by npm, which is not on the PATH.")
    wanted = [package for each in programs for package in (each.package, each.needs) if package]
    missing = [package for package in wanted if not _is_installed(directory, package)]
    if missing:
        options = ("--prefix", str(directory), "--no-audit", "--no-fund")
        subprocess.run(["npm", "install", *options, *missing], check=True)
    return directory / "node_modules" / ".bin"


def _is_installed(directory: Path, package: str) -> bool:
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
