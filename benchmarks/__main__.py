"""`python -m benchmarks [kv|batch|store|all]`: run, show, save."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks import batch, kv, store
from benchmarks.measure import Cost, Record, Task
from benchmarks.report import Report, show, write_json
from benchmarks.requests.measure import describe_machine
from keepwarm.errors import BadInput, KeepwarmError


class Bench(StrEnum):
    KV = "kv"
    BATCH = "batch"
    STORE = "store"
    ALL = "all"


def main(
    bench: Annotated[Bench, typer.Argument(help="What to measure.")] = Bench.ALL,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small caches, seconds: a check that it runs.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write all results to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Plot the costs of a store to this file.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=512, help="Skip longer caches.")
    ] = None,
) -> None:
    """Measure slicing, saving, restoring, merging and batching of KV caches on this machine."""
    for file in (json, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise BadInput(f"The directory of {file} does not exist; create it first.")
    limit = max_tokens or (512 if quick else 32_768)
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="keepwarm-bench-") as folder:
        records = run(list(tasks(bench, Path(folder), limit, quick)))
    command = command_line(bench, quick, max_tokens)
    report = Report(command, datetime.now(UTC).date().isoformat(), machine, records)
    show(report, Console())
    if json is not None:
        write_json(report, json)
    if plot is not None:
        store.plot(report.of(Cost), plot)


def tasks(bench: Bench, folder: Path, max_tokens: int, quick: bool) -> Iterator[Task]:
    if bench in (Bench.KV, Bench.ALL):
        yield from kv.tasks(folder, max_tokens, quick)
    if bench in (Bench.BATCH, Bench.ALL):
        yield from batch.tasks(folder, max_tokens, quick)
    if bench in (Bench.STORE, Bench.ALL):
        yield from store.tasks(folder, max_tokens, quick)


def run(todo: list[Task]) -> list[Record]:
    """Run all tasks in order, with a progress bar on standard error."""
    records: list[Record] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(todo))
        for task in todo:
            progress.update(bar, description=task.label)
            records += task.run()
            progress.advance(bar)
    return records


def command_line(bench: Bench, quick: bool, max_tokens: int | None) -> str:
    """The command, without file names."""
    words = ["python -m benchmarks", bench.value]
    words += ["--quick"] * quick
    words += [f"--max-tokens {max_tokens}"] if max_tokens else []
    return " ".join(words)


if __name__ == "__main__":
    try:
        typer.run(main)
    except KeepwarmError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
