"""`python -m benchmarks.zoo [type …]`: every model type of mlx-lm through the engine, tiny.

With `--json` every type is kept as soon as it is done, and types that are in the file already are
run again only if they are named. `python -m tests.kit.generated` makes the page of it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.zoo.findings import Findings, Results
from benchmarks.zoo.models import model_types
from benchmarks.zoo.page import summary
from benchmarks.zoo.trials import DTYPES, first_process, next_process
from keepwarm.bench.measure import describe_machine, in_child
from keepwarm.errors import InsufficientResources


def examine(name: str, folder: Path) -> list[Findings]:
    """Put one type through all trials, in two processes after each other."""
    try:
        found = in_child(first_process, name, folder)
        return in_child(next_process, found, folder)
    except InsufficientResources:
        return [Findings(name, dtype, crash="its process died") for dtype in DTYPES]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Model types; all if none.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Keep the results here.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Types at a time.")] = 1,
) -> None:
    """Compare whatever is warm with a cold run; exit code 1 if anything differs."""
    results = _begin(json)
    wanted = names or [name for name in model_types() if name not in results.names]
    with (
        tempfile.TemporaryDirectory(prefix="keepwarm-zoo-") as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        for found in pool.map(partial(examine, folder=Path(folder)), wanted):
            _note(results, found, json)
    print(summary(results))
    sys.exit(any(one.is_bad for one in results.findings))


def _begin(path: Path | None) -> Results:
    today = datetime.now(UTC).date().isoformat()
    if path is not None and path.exists():
        return replace(Results.read(path), date=today)
    command = "python -m benchmarks.zoo --json docs/results/zoo.json"
    return Results(command, today, describe_machine())


def _note(results: Results, found: Sequence[Findings], path: Path | None) -> None:
    results.put(found)
    for one in found:
        print(f"{one.name}, {one.dtype}: {one.verdict}", flush=True)
    if path is not None:
        results.write(path)


if __name__ == "__main__":
    typer.run(main)
