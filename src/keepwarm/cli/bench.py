"""`keepwarm bench`: the same workloads on several servers in one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console

from keepwarm import config
from keepwarm.cli.options import ModelName
from keepwarm.errors import BadInput

if TYPE_CHECKING:
    from keepwarm.bench.report.results import Results

TARGETS = ("keepwarm", "mlx-lm")

Workloads: TypeAlias = Annotated[
    list[str] | None, typer.Argument(help="Which to run; all if none is named.")
]
Wanted: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="Whom to measure, again for each: keepwarm, mlx-lm, engine, or an OpenAI-compatible "
        "base URL, also as NAME=URL. Default: keepwarm and mlx-lm.",
    ),
]
Samples: TypeAlias = Annotated[
    int | None, typer.Option("--samples", min=1, help="Of each thing; 5 if not given.")
]
Quick: TypeAlias = Annotated[
    bool,
    typer.Option("--quick", help="Short prompts, two samples, nothing judged: does it work here?"),
]
JsonFile: TypeAlias = Annotated[
    Path | None, typer.Option("--json", help="Keep machine, versions and all samples here.")
]
HtmlFile: TypeAlias = Annotated[
    Path | None, typer.Option("--html", help="Write a page with plots.")
]
MarkdownFile: TypeAlias = Annotated[
    Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")
]
Baseline: TypeAlias = Annotated[
    Path | None, typer.Option("--save-baseline", help="Keep this run to compare others with.")
]
Compared: TypeAlias = Annotated[
    Path | None, typer.Option("--compare", help="Say what differs from this baseline.")
]
ListAll: TypeAlias = Annotated[
    bool, typer.Option("--list", help="Say which workloads there are, and leave.")
]


def bench(
    workloads: Workloads = None,
    *,
    target: Wanted = None,
    model: ModelName = None,
    samples: Samples = None,
    quick: Quick = False,
    json: JsonFile = None,
    html: HtmlFile = None,
    markdown: MarkdownFile = None,
    save_baseline: Baseline = None,
    compare: Compared = None,
    list_all: ListAll = False,
) -> None:
    """Measure first tokens, reuse and throughput, and compare servers."""
    from keepwarm.bench.report import page, tables
    from keepwarm.bench.report.results import Results

    if list_all:
        _show_workloads()
        return
    _check_places(json, html, markdown, save_baseline)
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


def _check_places(*files: Path | None) -> None:
    """Before anything is measured."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise BadInput(f"There is no directory for {file}; make it first.")


def _measure(
    workloads: list[str], wanted: list[str], model: str | None, samples: int | None, quick: bool
) -> Results:
    from keepwarm.bench import suite
    from keepwarm.bench.run import QUICK, Sizes

    sizes = QUICK if quick else Sizes()
    sizes = replace(sizes, samples=samples or sizes.samples)
    names = suite.select(workloads)
    name = config.load(model=model).model
    words = ["keepwarm bench", *workloads, *(f"--target {one.split('=')[0]}" for one in wanted)]
    words += ["--quick"] * quick + ([f"--samples {samples}"] if samples else [])
    return suite.measure(names, wanted, name, sizes, " ".join(words))


def _show_workloads() -> None:
    from keepwarm.bench.suite import WORKLOADS

    for name, workload in WORKLOADS.items():
        print(f"{name:12} {workload.about}")


def _show(results: Results, console: Console) -> None:
    from keepwarm.bench.report import tables

    console.print(tables.heading(results))
    for grid in tables.grids(results):
        console.print(grid.rich())


def _show_changes(before: Results, after: Results, console: Console) -> None:
    from keepwarm.bench.report import tables
    from keepwarm.bench.report.compare import changes, comparable

    if not comparable(before, after):
        console.print("The baseline is of another machine or model: only ratios are compared.")
    console.print(tables.comparison(changes(before, after)).rich())
