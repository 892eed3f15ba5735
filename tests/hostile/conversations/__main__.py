"""Run the architectures, print each report, fail if an answer was not that of a cold run.

With `--json` a report is kept as soon as it is done, and architectures that are in the file already
are asked again only if they are named.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.requests.measure import describe_machine

from keepwarm import blas


def main() -> int:
    given = _arguments()
    results = _begin(given)
    blas.start()
    from tests.hostile.conversations.run import life_of, shares  # import mlx
    from tests.kit.engines import Models

    known = results["architectures"]
    wanted = given.names or [name for name in shares(given.requests) if name not in known]
    with tempfile.TemporaryDirectory(prefix="keepwarm-conversations-") as folder:
        models = Models(Path(folder) / "models")
        for name in wanted:
            began = time.monotonic()
            life = life_of(name, models, Path(folder) / name, given.seed)
            known[name] = life.run(shares(given.requests)[name]).as_json()
            results["seconds"] += round(time.monotonic() - began)
            sys.stdout.write(f"{name}: {json.dumps(known[name])}\n")
            if given.json:
                given.json.write_text(f"{json.dumps(results, indent=1)}\n")
    return 1 if any(report["differences"] for report in known.values()) else 0


def _begin(given: argparse.Namespace) -> dict[str, Any]:
    if given.json and given.json.exists():
        known: dict[str, Any] = json.loads(given.json.read_text())
        return known
    asked = f"--requests {given.requests} --seed {given.seed}"
    return {
        "command": f"python -m tests.hostile.conversations {asked}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "seconds": 0,
        "architectures": {},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.conversations")
    parser.add_argument("names", nargs="*", help="architectures of the kit; all if none")
    parser.add_argument("--requests", type=int, default=2000, help="to all of them together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
