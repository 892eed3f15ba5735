"""`python -m benchmarks.requests`: whole requests to servers and the engine, side by side."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console

from keepwarm import config
from keepwarm.cli.options import ModelName, check_parents
from keepwarm.errors import KeepwarmError

if TYPE_CHECKING:
    from benchmarks.requests.report.results import Results

TARGETS = ("keepwarm", "mlx-lm")

Workloads: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="WORKLOAD", help="Workloads to run; default all.")
]
Targets: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        metavar="SERVER",
        help="Server to measure; repeatable. keepwarm, mlx-lm, engine, or the base URL of an "
        "OpenAI-compatible server, optionally NAME=URL. Default: keepwarm and mlx-lm.",
    ),
]
Samples: TypeAlias = Annotated[
    int | None, typer.Option("--samples", min=1, help="Samples per measurement (default 5).")
]
Quick: TypeAlias = Annotated[
    bool,
    typer.Option("--quick", help="Short prompts, two samples, no pass or fail: a smoke test."),
]
JsonFile: TypeAlias = Annotated[
    Path | None, typer.Option("--json", help="Write machine, versions and all samples here.")
]
HtmlFile: TypeAlias = Annotated[
    Path | None, typer.Option("--html", help="Write an HTML page with plots.")
]
MarkdownFile: TypeAlias = Annotated[
    Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")
]
BaselineFile: TypeAlias = Annotated[
    Path | None, typer.Option("--save-baseline", help="Save this run as a baseline.")
]
ComparedFile: TypeAlias = Annotated[
    Path | None, typer.Option("--compare", help="Show differences from this baseline.")
]
ListAll: TypeAlias = Annotated[bool, typer.Option("--list", help="List the workloads and exit.")]


def bench(
    workloads: Workloads = None,
    *,
    target: Targets = None,
    model: ModelName = None,
    samples: Samples = None,
    quick: Quick = False,
    json: JsonFile = None,
    html: HtmlFile = None,
    markdown: MarkdownFile = None,
    save_baseline: BaselineFile = None,
    compare: ComparedFile = None,
    list_all: ListAll = False,
) -> None:
    """Measure time to first token, reuse and throughput.

    Each --target is a server; several are compared.
    """
    from benchmarks.requests.report import page, tables
    from benchmarks.requests.report.results import Results

    if list_all:
        _show_workloads()
        return
    check_parents(json, html, markdown, save_baseline)
    before = Results.read(compare) if compare else None
    results = _measure(workloads or [], target or list(TARGETS), model, samples, quick)
    console = Console()
    _show(results, console)
    if before is not None:
        _show_changes(before, results, console)
    for file in (json, save_baseline):
        if file is not None:
            results.write(file)
    if markdown is not None:
        markdown.write_text(tables.markdown(results))
    if html is not None:
        html.write_text(page.html(results))


def _measure(
    workloads: list[str], wanted: list[str], model: str | None, samples: int | None, quick: bool
) -> Results:
    from benchmarks.requests import files, suite
    from benchmarks.requests.run import QUICK, Sizes
    from benchmarks.requests.targets import unwound_by_signals

    sizes = QUICK if quick else Sizes()
    sizes = replace(sizes, samples=samples or sizes.samples)
    names = suite.select(workloads)
    name = config.load(model=model).model
    words = [
        "python -m benchmarks.requests",
        *workloads,
        *(f"--target {one.split('=')[0]}" for one in wanted),
    ]
    words += [f"--model {files.as_published(name)}"] * bool(model)
    words += ["--quick"] * quick + [f"--samples {samples}"] * bool(samples)
    with unwound_by_signals():
        return suite.measure(names, wanted, name, sizes, " ".join(words))


def _show_workloads() -> None:
    from benchmarks.requests.suite import WORKLOADS

    for name, workload in WORKLOADS.items():
        print(f"{name:12} {workload.about}")


def _show(results: Results, console: Console) -> None:
    from benchmarks.requests.report import tables

    console.print(tables.heading(results))
    for grid in tables.grids(results):
        console.print(grid.rich())


def _show_changes(before: Results, after: Results, console: Console) -> None:
    from benchmarks.requests.report import tables
    from benchmarks.requests.report.compare import changes, comparable

    if not comparable(before, after):
        console.print("The baseline is from another machine or model; only ratios are compared.")
    console.print(tables.comparison(changes(before, after)).rich())


def main() -> None:
    """A KeepwarmError is one sentence with exit code 2."""
    try:
        typer.run(bench)
    except KeepwarmError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
