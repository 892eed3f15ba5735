"""Run the soak, print its report, fail if anything was wrong."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.fairness import Models
from benchmarks.requests.measure import describe_machine
from benchmarks.requests.targets import unwound_by_signals

from tests.hostile.soak.run import Report, Soak


def main() -> int:
    given = _arguments()
    began = time.monotonic()
    length = f"--hours {given.hours:g}" if given.hours else f"--requests {given.requests}"
    head = {
        "command": f"python -m tests.hostile.soak {length} --kills {given.kills}"
        f" --talks {given.talks} --seed {given.seed}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
    }

    def keep(report: Report) -> str:
        seconds = round(time.monotonic() - began)
        text = json.dumps({**head, "seconds": seconds, **report.as_json()}, indent=2) + "\n"
        if given.json:
            given.json.write_text(text)
        return text

    with _folder(given.folder) as folder:
        models = Models.random(folder / "models", shape={})
        soak = Soak(folder, models, given.talks, given.seed, given.hours, keep)
        report = soak.run(given.requests, given.kills)
    sys.stdout.write(keep(report))
    return 1 if report.unexpected else 0


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    """The one that is kept for the next run, or one that is deleted."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="keepwarm-soak-") as folder:
        yield Path(folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.soak")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--talks", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=0.0, help="in place of requests")
    parser.add_argument("--folder", type=Path, help="of the stores; the next run goes on with them")
    parser.add_argument("--json", type=Path, help="written every minute of a run of hours")
    return parser.parse_args()


if __name__ == "__main__":
    with unwound_by_signals():
        sys.exit(main())
