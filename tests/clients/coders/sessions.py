"""`python -m tests.clients.coders.sessions`: what a new session of a published client computes.

In the same project, after a file was created there, and in another project; and a second subagent
of one kind. With a template that writes no tools, with one of Qwen's kind and with one of Llama's,
each in the client's own order and with the default settings. A client is run once; what it sent is
then sent to a server of each kind.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.requests.measure import describe_machine
from tokenizers import Tokenizer

from keepwarm import config
from keepwarm.models.load import load
from tests.clients.coders.model import FILE, NOTE
from tests.clients.coders.page import sessions_table
from tests.clients.coders.programs import (
    CLAUDE,
    CODEX,
    OPENCODE,
    QWEN,
    Place,
    Program,
    arguments,
    install,
)
from tests.clients.conftest import Exchange, Recorder
from tests.kit.agent_model import (
    LLAMAS_CHATML,
    N_CONTEXT,
    SMALL,
    TOKENIZER,
    TOOLS_CHATML,
    Leading,
)
from tests.kit.checkpoints import CHATML, write_checkpoint
from tests.server.conftest import serve

# By the names that the results have; npm picks the second on Node 20.
PROGRAMS = {
    **{program.name: program for program in (CLAUDE, CODEX, OPENCODE, QWEN)},
    "claude-node20": replace(CLAUDE, package="@anthropic-ai/claude-code@2.1.197"),
}
OURS, QWENS, LLAMAS = "Keepwarm's tool block", "of Qwen's kind", "of Llama's kind"
KINDS = {OURS: CHATML, QWENS: TOOLS_CHATML, LLAMAS: LLAMAS_CHATML}
SETTINGS = ("off", "known")  # the client's own order, and the default
# Tools that start a subagent, by client; the second is asked something else.
KINDS_OF_SUBAGENTS = {"claude": ("Agent", "Explore"), "opencode": ("task", "general")}
SUBAGENTS = {"subagent": "Which files are there?", "second subagent": "Who wrote these notes?"}
GIT = ("git", "-c", "user.name=Test", "-c", "user.email=test@example.org")


def main() -> None:
    given = arguments("tests.clients.coders.sessions", PROGRAMS)
    for name in given.clients or PROGRAMS:
        program = PROGRAMS[name]
        # Each in a folder of its own: two versions of a package are no neighbours.
        programs = install(given.programs / program.name / program.version, [program])
        found = {name: _measure(program, programs)}
        sys.stdout.write(sessions_table(found))
        sys.stdout.flush()
        if given.json:
            _keep(found, given.json)


def _keep(found: dict[str, Any], file: Path) -> None:
    """As soon as a client is measured; others may have been meanwhile."""
    known = json.loads(file.read_text())["clients"] if file.exists() else {}
    clients = {**known, **found}
    results = {
        "command": "python -m tests.clients.coders.sessions --json docs/results/sessions.json",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "clients": {name: clients[name] for name in PROGRAMS if name in clients},
    }
    file.write_text(json.dumps(results, indent=1) + "\n")


def _measure(program: Program, programs: Path) -> dict[str, Any]:
    """One client's sessions, recorded once, then sent to a server of every kind and setting."""
    # Always the same folder: its name is in the prompts.
    folder = Path(tempfile.gettempdir(), "keepwarm-sessions", program.name)
    shutil.rmtree(folder, ignore_errors=True)
    models = {kind: _model(folder / str(at), KINDS[kind]) for at, kind in enumerate(KINDS)}
    recorded = _record(program, programs, folder, models[QWENS])
    kinds = {
        kind: {
            setting: _replay(model, folder / f"{at}-{setting}", setting, recorded)
            for setting in SETTINGS
        }
        for at, (kind, model) in enumerate(models.items())
    }
    shutil.rmtree(folder)
    return {"name": program.name, "version": program.version, "kinds": kinds}


def _model(folder: Path, template: str) -> Any:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    options = {"n_context": N_CONTEXT, "tokenizer": tokenizer, "shape": SMALL}
    write_checkpoint(folder, template=template, **options)
    return load(str(folder), config.load({}, home=None))


def _record(program: Program, programs: Path, folder: Path, model: Any) -> dict[str, Exchange]:
    """The first request of each session, as the published client sends it."""
    here, elsewhere = write_project(folder / "project"), write_project(folder / "elsewhere")
    seen: list[Exchange] = []
    found = {}
    with serve(
        model,
        config.load({"KEEPWARM_HOME": str(folder / "home")}),
        partial(Leading, calls={}),
        lambda app: app.add_middleware(Recorder, seen=seen),
    ) as live:
        for step, project in {"first": here, "same": here, "other": elsewhere}.items():
            if step == "same":
                (here / "new.txt").write_text("New.\n")
            seen.clear()
            place = Place(live.url, programs, project, folder / "client")
            program.run(place, "", (*program.ask, f"What can you do in the {step} session?"))
            found[step] = max(filter(_offers_tools, seen), key=lambda each: len(each.body))
        place = Place(live.url, programs, here, folder / "client")
        for step in SUBAGENTS if program.name in KINDS_OF_SUBAGENTS else ():
            seen.clear()
            live.host.calls = _subagent(program, step)  # type: ignore[attr-defined]
            program.run(place, "", (*program.ask, f"Ask a {step}."))
            found[step] = next(each for each in seen if _is_of_subagent(each, step))
    return found


def _subagent(program: Program, step: str) -> dict[str, dict[str, str]]:
    """The call that starts it."""
    tool, kind = KINDS_OF_SUBAGENTS[program.name]
    asked = {"description": "Look around", "prompt": SUBAGENTS[step], "subagent_type": kind}
    return {tool: asked}


def _is_of_subagent(exchange: Exchange, step: str) -> bool:
    """A request that begins with what the subagent was asked."""
    messages = (exchange.json or {}).get("messages", [])
    asked = [json.dumps(each) for each in messages if each["role"] == "user"]
    return _offers_tools(exchange) and bool(asked) and SUBAGENTS[step] in asked[0]


def _offers_tools(exchange: Exchange) -> bool:
    return exchange.method == "POST" and bool(exchange.json and exchange.json.get("tools"))


def _replay(model: Any, home: Path, setting: str, recorded: dict[str, Exchange]) -> dict[str, Any]:
    settings = config.load({"KEEPWARM_HOME": str(home)}, stable_first=setting)
    costs = {}
    with serve(model, settings) as live:
        for step, exchange in recorded.items():
            length = "max_output_tokens" if exchange.path.endswith("responses") else "max_tokens"
            body = {**exchange.json, "stream": False, length: 1}
            body.pop("stream_options", None)
            answer = live.post(exchange.path, body)
            assert answer.is_success, answer.text
            receipt = answer.json()["keepwarm"]
            counts = {"prompt": receipt["prompt_tokens"], "computed": receipt["recomputed"]}
            costs[step] = {**counts, "reordered": receipt.get("reordered", [])}
            live.host.engine.wait_until_saved()
    return costs


def write_project(folder: Path) -> Path:
    """A repository with a file and its instructions for agents."""
    folder.mkdir(parents=True)
    (folder / FILE).write_text(NOTE + "\n")
    for name in ("AGENTS.md", "CLAUDE.md", "QWEN.md"):
        (folder / name).write_text(f"# The {folder.name}\n\nIts files are notes.\n")
    for command in (("init", "-b", "main"), ("add", "."), ("commit", "-m", f"Begin {folder.name}")):
        subprocess.run([*GIT, *command], cwd=folder, check=True, capture_output=True)
    return folder


if __name__ == "__main__":
    main()
