"""`python -m benchmarks.zoo [type …]`: every model type of mlx-lm through the engine, tiny.

With `--json` every type is kept as soon as it is done, and types that are in the file already are
run again only if they are named. `python -m tests.kit.generated` makes the page of it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, ParamSpec

import mlx.core as mx
import typer

from benchmarks.requests.measure import describe_machine
from benchmarks.zoo.findings import Findings, Results
from benchmarks.zoo.models import model_types
from benchmarks.zoo.page import summary
from benchmarks.zoo.trials import DTYPES, first_process, next_process

P = ParamSpec("P")


def examine(name: str, dtype: str, folder: Path) -> Findings:
    """Put one type through all trials, in two processes after each other."""
    try:
        found = _in_child(first_process, name, dtype, folder)
        return found if found.left_out or found.crash else _in_child(next_process, found, folder)
    except BrokenProcessPool:
        return Findings(name, dtype, crash="its process died")


def _in_child(work: Callable[P, Findings], *args: P.args, **kwargs: P.kwargs) -> Findings:
    """On Linux a fork of a process that has imported everything, which takes seconds.

    No fork can use CUDA, which MLX starts when it is imported.
    """
    forks = sys.platform == "linux" and not mx.cuda.is_available()
    context = get_context("forkserver" if forks else "spawn")
    context.set_forkserver_preload([first_process.__module__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *args, **kwargs).result()


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Model types; all if none.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Keep the results here.")] = None,
    dtypes: Annotated[str, typer.Option("--dtypes", help="Of the models.")] = ",".join(DTYPES),
    jobs: Annotated[int, typer.Option("--jobs", help="Types at a time.")] = 1,
) -> None:
    """Compare whatever is warm with a cold run; exit code 1 if anything differs."""
    results = _begin(json)
    wanted = [(name, dtype) for dtype in dtypes.split(",") for name in names or model_types()]
    if not names:
        wanted = [key for key in wanted if key not in results.known]
    with (
        tempfile.TemporaryDirectory(prefix="keepwarm-zoo-") as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        asked = [pool.submit(examine, name, dtype, Path(folder)) for name, dtype in wanted]
        for done in as_completed(asked):
            _note(results, done.result(), json)
    print(summary(results))
    sys.exit(any(one.is_bad for one in results.findings))


def _begin(path: Path | None) -> Results:
    today = datetime.now(UTC).date().isoformat()
    if path is not None and path.exists():
        return replace(Results.read(path), date=today)
    command = "python -m benchmarks.zoo --json docs/results/zoo.json"
    return Results(command, today, describe_machine())


def _note(results: Results, found: Findings, path: Path | None) -> None:
    results.put(found)
    print(f"{found.name}, {found.dtype}: {found.verdict}", flush=True)
    if path is not None:
        results.write(path)


if __name__ == "__main__":
    typer.run(main)
