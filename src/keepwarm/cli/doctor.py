"""`keepwarm doctor`: this machine's hardware, speed and versions, with advice."""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from keepwarm import config
from keepwarm.cli.options import check_parents
from keepwarm.units import format_bytes

if TYPE_CHECKING:
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
    from keepwarm.cache.padding import padding_book
    from keepwarm.cache.shared.opening import measure_remotes
    from keepwarm.device.machine import snapshot  # imports MLX

    settings = config.load()
    machine = snapshot(settings)
    file = str(config.find_folders(os.environ).config)
    alone = [known.model for known in padding_book(settings.home).alone()]
    remotes = measure_remotes(settings)
    if json:
        found = {"config": file, "models": str(settings.models), "not_batched": alone}
        shared = [remote._asdict() for remote in remotes]
        print(dumps(as_json(machine) | found | {"remotes": shared}))
    else:
        places = {"Configuration": file, "Models": str(settings.models)}
        Console().print(_table(machine, alone, places, remotes))


def _write_report(path: Path, quick: bool) -> None:
    from keepwarm.bench import suite
    from keepwarm.bench.run import QUICK, Sizes
    from keepwarm.bench.summary import COLUMNS, WORKLOADS, machine_page

    check_parents(path)
    command = f"keepwarm doctor --report {path.name}{' --quick' * quick}"
    sizes, model = QUICK if quick else Sizes(), config.load().model
    page = machine_page(suite.measure(WORKLOADS, list(COLUMNS), model, sizes, command), quick)
    path.write_text(page)
    print(page)


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
    machine: Machine, alone: list[str], places: dict[str, str], remotes: list[RemoteReport]
) -> Table:
    """`alone` are the models whose rows differ in a batch."""
    table = Table("", "", show_header=False, box=None)
    for name, value in (_rows(machine) | places).items():
        table.add_row(f"[bold]{name}[/bold]", value)
    if alone:
        table.add_row("[bold]Not batched[/bold]", ", ".join(alone))
    for remote in remotes:
        table.add_row("[bold]Shared tier[/bold]", _remote(remote))
    return table


def _remote(remote: RemoteReport) -> str:
    if remote.problem:
        return f"{remote.address}, not usable: {remote.problem}"
    rate = format_bytes(int(remote.bytes_per_s))
    return f"{remote.address}, {remote.latency_s * 1000:.1f} ms, {rate}/s"


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
