"""`python -m tests.clients.coders`: install the clients, walk with each, keep what it cost."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.requests.measure import describe_machine

from tests.clients.coders.page import table
from tests.clients.coders.programs import PROGRAMS, arguments, install
from tests.clients.coders.walk import Walk


def main() -> int:
    given = arguments("tests.clients.coders", PROGRAMS)
    began = time.monotonic()
    programs = install(given.programs)
    clients = {name: _walk(name, programs) for name in given.clients or PROGRAMS}
    results = {
        "command": "python -m tests.clients.coders --json docs/results/coders.json",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "seconds": round(time.monotonic() - began),
        "clients": clients,
    }
    if given.json:
        given.json.write_text(json.dumps(_with_others(results, given.json), indent=1) + "\n")
    steps = [step for client in clients.values() for step in client["steps"]]
    return 0 if all(step["keeps_head"] for step in steps) else 1


def _with_others(results: dict[str, Any], path: Path) -> dict[str, Any]:
    """With the clients of earlier runs that this one did not ask."""
    if not path.exists():
        return results
    known = json.loads(path.read_text())["clients"]
    clients = {**known, **results["clients"]}
    return {**results, "clients": {name: clients[name] for name in PROGRAMS if name in clients}}


def _walk(name: str, programs: Path) -> dict[str, Any]:
    program = PROGRAMS[name]
    # Always the same folder: its name is in the prompts.
    folder = Path(tempfile.gettempdir(), "keepwarm-coders", name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    walk = Walk(program, programs, folder)
    try:
        walk.run()
    finally:
        steps = [each.as_json() for each in walk.steps]
        sys.stdout.write(f"{name} {program.version}\n\n{table(steps)}\n")
    shutil.rmtree(folder)
    return {"version": program.version, "steps": steps}


if __name__ == "__main__":
    sys.exit(main())
