"""Run all architectures, print the report, fail if an answer was not that of a cold run."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from keepwarm import blas
from keepwarm.bench.measure import describe_machine


def main() -> int:
    given = _arguments()
    blas.start()
    from tests.hostile.conversations.run import fuzz  # imports mlx

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepwarm-conversations-") as folder:
        reports = fuzz(Path(folder), given.requests, given.seed)
    results = {
        "command": "python -m tests.hostile.conversations "
        f"--requests {given.requests} --seed {given.seed}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "seconds": round(time.monotonic() - began),
        "architectures": {name: asdict(report) for name, report in reports.items()},
    }
    text = json.dumps(results, indent=1)
    sys.stdout.write(f"{text}\n")
    if given.json:
        given.json.write_text(f"{text}\n")
    return 1 if any(report.differences for report in reports.values()) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.conversations")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
