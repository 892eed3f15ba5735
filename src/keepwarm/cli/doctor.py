"""`keepwarm doctor`: this machine's hardware, speed and versions, with advice."""

from __future__ import annotations

import os
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from keepwarm import config
from keepwarm.cli.options import check_parents
from keepwarm.errors import BadInput, KeepwarmError
from keepwarm.units import format_bytes, format_rate

if TYPE_CHECKING:
    from keepwarm.cache.break_even import ModelCosts
    from keepwarm.cache.shared.opening import RemoteReport
    from keepwarm.device.machine import Machine


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Measure this machine against mlx_lm.server, which takes from minutes (GPU) to an "
            "hour (CPU), and write a page to paste: machine, versions, the README's table."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --report: short prompts, two samples.")
    ] = False,
) -> None:
    """Show backend, BLAS, speed, memory, disk, versions and advice."""
    if report is not None:
        _write_report(report, quick)
        return
    if quick:
        raise BadInput("--quick shortens --report; name the page to write with --report FILE.")
    from keepwarm.device.machine import snapshot  # imports MLX
    from keepwarm.engine.padding import padding_book

    settings = config.load()
    machine = snapshot(settings)
    file = str(config.find_folders(os.environ).config)
    alone = [known.model for known in padding_book(settings.home).alone()]
    remotes = _measure_remotes(settings)
    if json:
        found = {"config": file, "models": str(settings.models), "not_batched": alone}
        print(dumps(as_json(machine) | found | {"remotes": [one.as_json() for one in remotes]}))
    else:
        places = {"Configuration": file, "Models": str(settings.models)}
        Console().print(_table(machine, alone, places, remotes))


class MeasuredRemote(NamedTuple):
    """A shared tier, and from how many tokens on it is faster than computing."""

    report: RemoteReport
    break_even: int | None = None
    verdict: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            **self.report._asdict(),
            "break_even_tokens": self.break_even,
            "break_even": self.verdict,
        }

    @property
    def speed(self) -> str:
        """Without its address, which is nobody else's business."""
        _, latency_s, read, problem, put = self.report
        if problem:
            return "not usable"
        written = f"writes {format_rate(put)}" if put else "is full"
        said = f"{latency_s * 1000:.1f} ms, reads {format_rate(read)}, {written}"
        return f"{said}: {self.verdict}" if self.verdict else said

    def __str__(self) -> str:
        why = f": {self.report.problem}" if self.report.problem else ""
        return f"{self.report.address}, {self.speed}{why}"


def _measure_remotes(settings: config.Settings) -> list[MeasuredRemote]:
    from keepwarm.cache.break_even import break_even, describe
    from keepwarm.cache.shared.opening import measure_remotes

    reports = measure_remotes(settings)
    costs = _costs(settings) if any(not report.problem for report in reports) else None
    return [
        MeasuredRemote(report)
        if costs is None or report.problem
        else MeasuredRemote(report, break_even(costs, report), describe(costs, report))
        for report in reports
    ]


def _costs(settings: config.Settings) -> ModelCosts | None:
    """Of the model of the settings: as the engine remembers them, or measured; None if the model
    is not here, or does not fit."""
    from keepwarm.cache.break_even import is_here, remembered_costs

    known = remembered_costs(settings)
    if known is None and is_here(settings):
        from keepwarm.engine.compilation import measure_model

        try:
            measure_model(settings)
        except KeepwarmError as error:
            print(f"{settings.model} could not be measured: {error}", file=sys.stderr)
        known = remembered_costs(settings)
    return known


def _write_report(path: Path, quick: bool) -> None:
    from keepwarm.bench import suite
    from keepwarm.bench.run import QUICK, Sizes
    from keepwarm.bench.summary import COLUMNS, WORKLOADS, machine_page

    check_parents(path)
    command = f"keepwarm doctor --report {path.name}{' --quick' * quick}"
    settings, sizes = config.load(), QUICK if quick else Sizes()
    results = suite.measure(WORKLOADS, list(COLUMNS), settings.model, sizes, command)
    page = machine_page(results, quick) + _tiers_page(_measure_remotes(settings))
    path.write_text(page)
    print(page)


def _tiers_page(remotes: list[MeasuredRemote]) -> str:
    kinds = [urlsplit(remote.report.address).scheme for remote in remotes]
    lines = [f"- Shared tier, {k}: {r.speed}\n" for k, r in zip(kinds, remotes, strict=True)]
    return "".join(["\n", *lines]) if lines else ""


def as_json(machine: Machine) -> dict[str, Any]:
    """The snapshot under the stable names of `--json`."""
    return {
        "backend": machine.backend,
        "device": machine.device,
        "blas": machine.blas and f"{machine.blas.name} ({machine.blas.layer})",
        "blas_threads": machine.blas and machine.blas.threads,
        "gemm_gflops": round(machine.gemm_gflops, 1),
        "memory_total_bytes": machine.memory_total_bytes,
        "memory_available_bytes": machine.memory_available_bytes,
        "home": str(machine.home),
        "store": str(machine.store),
        "free_disk_bytes": machine.free_disk_bytes,
        "versions": machine.versions,
        "kernels": machine.n_kernels,
        "advice": machine.advice,
    }


def _table(
    machine: Machine, alone: list[str], places: dict[str, str], remotes: list[MeasuredRemote]
) -> Table:
    """`alone` are the models whose rows differ in a batch."""
    table = Table("", "", show_header=False, box=None)
    for name, value in (_rows(machine) | places).items():
        table.add_row(f"[bold]{name}[/bold]", value)
    if alone:
        table.add_row("[bold]Not batched[/bold]", ", ".join(alone))
    for remote in remotes:
        table.add_row("[bold]Shared tier[/bold]", str(remote))
    return table


def _rows(machine: Machine) -> dict[str, str]:
    used = machine.blas
    blas = (
        f"{used.name} ({used.layer}), {used.threads} of {machine.n_cpus} cores"
        if used
        else "built into MLX"
    )
    free, total = (
        format_bytes(machine.memory_available_bytes),
        format_bytes(machine.memory_total_bytes),
    )
    rows = {
        "Backend": f"{machine.backend}, {machine.device}",
        "BLAS": blas,
        "fp32 matmul": f"{machine.gemm_gflops:.1f} GFLOP/s",
        "Memory": f"{free} free of {total}",
        "Home": str(machine.home),
        "Block store": f"{machine.store}, {format_bytes(machine.free_disk_bytes)} free",
        "Versions": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "Advice": machine.advice,
    }
    if machine.n_kernels is not None:
        rows["Kernels"] = _kernels(machine.n_kernels)
    return rows


def _kernels(n_kept: int) -> str:
    if n_kept:
        return f"{n_kept} kept for this GPU and MLX"
    return "none kept yet: the first start compiles them, which takes two to four minutes"
