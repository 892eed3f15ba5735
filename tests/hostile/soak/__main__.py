"""Run the soak, print its report, fail if anything was wrong."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.requests.measure import describe_machine

from tests.hostile.soak.run import Soak
from tests.kit.checkpoints import write_checkpoint

N_CONTEXT = 4096


def main() -> int:
    given = _arguments()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepwarm-soak-") as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", n_context=N_CONTEXT)
        soak = Soak(Path(folder), checkpoint, given.talks, given.seed)
        report = soak.run(given.requests, given.kills).as_json()
    head = {
        "command": f"python -m tests.hostile.soak --requests {given.requests} --kills {given.kills}"
        f" --talks {given.talks} --seed {given.seed}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "seconds": round(time.monotonic() - began),
    }
    text = json.dumps({**head, **report}, indent=2)
    sys.stdout.write(f"{text}\n")
    if given.json:
        given.json.write_text(f"{text}\n")
    return 1 if report["unexpected"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.soak")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--talks", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
