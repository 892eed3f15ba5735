"""`keepwarm doctor`: this machine's hardware, speed and versions, with advice."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepwarm import config
from keepwarm.cli.options import check_parents, file_errors
from keepwarm.errors import BadInput
from keepwarm.units import format_bytes, format_rate

if TYPE_CHECKING:
    from keepwarm.device.machine import Machine
    from keepwarm.engine.answer import Answer
    from keepwarm.engine.engine import Engine
    from keepwarm.models.load import Model
    from keepwarm.remote.opening import RemoteReport


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Measure the model on this machine, which takes minutes, and write a page to "
            "paste: versions, time to first token cold and restored, decoding speed."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --report: short prompts, one sample.")
    ] = False,
) -> None:
    """Show backend, BLAS, speed, memory, disk, versions and advice."""
    if report is not None and json:
        raise BadInput("--json and --report cannot be combined: a report is a page.")
    if report is not None:
        _write_report(report, quick)
        return
    if quick:
        raise BadInput("--quick shortens --report; name the page to write with --report FILE.")
    from keepwarm.device.machine import snapshot  # imports MLX
    from keepwarm.engine.padding import VerdictsFile
    from keepwarm.remote.opening import measure_remotes

    settings = config.load()
    machine = snapshot(settings)
    file = str(config.find_folders(os.environ).config)
    alone = [known.model for known in VerdictsFile(settings.home).alone()]
    remotes = measure_remotes(settings)
    if json:
        found = {"config": file, "models": str(settings.models), "not_batched": alone}
        print(dumps(as_json(machine) | found | {"remotes": [one._asdict() for one in remotes]}))
    else:
        places = {"Configuration": file, "Models": str(settings.models)}
        places["At rest"] = _at_rest(settings, machine.free_disk_bytes)
        Console().print(_table(machine, alone, places, remotes))


def _at_rest(settings: config.Settings, free_disk_bytes: int) -> str:
    """How keys and values are kept, and whether fewer bits would help here."""
    if settings.at_rest != "exact":
        return f"{settings.at_rest}: fewer bytes, and answers that may differ"
    reasons = {
        "the disk has less room than its budget": free_disk_bytes < settings.disk_bytes,
        "what may be written is limited": settings.disk_writes_per_day > 0,
        "blocks travel to other machines": bool(settings.remote),
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    return f"exact; {why}: at_rest=q8 halves the bytes" if why else "exact"


def _speed(remote: RemoteReport) -> str:
    if remote.problem:
        return "not usable"
    put = remote.put_bytes_per_s
    written = f"writes {format_rate(put)}" if put else "is full or read-only"
    read = format_rate(remote.bytes_per_s)
    far = (
        f"; too far for prompts that compute in {remote.far_s:.1f} s or less"
        if remote.far_s
        else ""
    )
    return f"{remote.latency_s * 1000:.1f} ms, reads {read}, {written}{far}"


class Lengths(NamedTuple):
    """What `--report` measures: prompts of these many tokens, and samples of each."""

    prompts: tuple[int, ...]
    samples: int


FULL, QUICK = Lengths((512, 2048, 8192), 3), Lengths((64, 256), 1)
N_DECODED = 64  # tokens of each answer whose speed is measured
STREAMS = (1, 4)
Prompts: TypeAlias = dict[int, list[list[int]]]  # token ids, by length


class Figures(NamedTuple):
    """Seconds to the first token by prompt length, and decoded tokens per second by streams."""

    first_token_s: dict[str, dict[int, float]]
    tokens_per_s: dict[int, float]
    predicted_tokens_per_s: float | None = None  # of one stream


class Chip(NamedTuple):
    """Published figures of a chip, from which docs/results/metal.md predicts its speed."""

    memory_bytes_per_s: float
    disk_bytes_per_s: float

    def step_s(self, weight_bytes: int, kv_bytes: int) -> float:
        """A decode step reads all weights and all keys and values."""
        return STEP_HOST_S + (weight_bytes + kv_bytes) / (USED_SHARE * self.memory_bytes_per_s)

    def restore_s(self, kv_bytes: int) -> dict[str, float]:
        """From memory: read and written once, and half of that for everything else."""
        return {
            "from memory": 3 * kv_bytes / self.memory_bytes_per_s,
            "from disk": kv_bytes / (USED_SHARE * self.disk_bytes_per_s),
        }


CHIPS = {"Apple M4 Pro": Chip(273e9, 7.3e9), "Apple M5 Max": Chip(614e9, 13.6e9)}
USED_SHARE = 0.8  # of a published bandwidth
STEP_HOST_S = 0.002  # to build a step and to enqueue it


def _write_report(path: Path, quick: bool) -> None:
    with file_errors(path, "read"):
        check_parents(path)
    from keepwarm.device.machine import snapshot
    from keepwarm.remote.opening import measure_remotes

    settings = config.load()
    remotes = measure_remotes(settings)
    machine = snapshot(settings)
    figures = _measure_engine(
        replace(settings, remote=""), QUICK if quick else FULL, CHIPS.get(machine.device)
    )
    command = f"keepwarm doctor --report {path.name}{' --quick' * quick}"
    about = f"{Path(settings.model).name}, medians: `{command}`\n"
    page = "\n".join([_machine_page(machine), _figures_page(figures), about])
    print(page + _tiers_page(remotes))
    try:
        path.write_text(page + _tiers_page(remotes))
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(f"{path} cannot be written: {why}; the page is shown above.") from error


def _measure_engine(settings: config.Settings, lengths: Lengths, chip: Chip | None) -> Figures:
    """Cold, again, and again by an engine that has opened the same store anew."""
    from keepwarm.models.load import load

    model = load(settings.model, settings)
    prompts = {
        n: [_prompt(n, seed) for seed in range(lengths.samples)]
        for n in lengths.prompts
        if n + N_DECODED <= model.n_context
    }
    with tempfile.TemporaryDirectory(prefix="keepwarm-report-") as folder:
        with _opened(model, Path(folder), settings) as engine:
            first = {name: _first_tokens_s(engine, prompts) for name in ("cold", "from memory")}
        with _opened(model, Path(folder), settings) as engine:
            first["from disk"] = _first_tokens_s(engine, prompts)
            measured = Figures(first, {n: _tokens_per_s(engine, n) for n in STREAMS})
            return _with_predictions(measured, chip, engine) if chip else measured


def _with_predictions(measured: Figures, chip: Chip, engine: Engine) -> Figures:
    from keepwarm.engine.admission import kv_bytes

    layout, weight_bytes = engine.lane_of().restorer.layout, engine.model.n_bytes
    first = dict(measured.first_token_s)
    for n_tokens in first["cold"]:
        size = kv_bytes(layout, n_tokens)
        step_s = chip.step_s(weight_bytes, size)
        for name, seconds in chip.restore_s(size).items():
            first.setdefault(f"{name}, predicted", {})[n_tokens] = seconds + step_s
    predicted = 1 / chip.step_s(weight_bytes, 0)
    return measured._replace(first_token_s=first, predicted_tokens_per_s=predicted)


@contextmanager
def _opened(model: Model, folder: Path, settings: config.Settings) -> Iterator[Engine]:
    from keepwarm.cache.store import Store
    from keepwarm.engine.engine import Engine

    with Store(folder, settings=settings) as store, Engine(model, store, settings=settings) as made:
        _answer(made, _prompt(8, seed=-1), 2).result()  # compiles kernels
        yield made


def _prompt(n_tokens: int, seed: int) -> list[int]:
    """Token ids; the first one differs by seed and length, so that prompts share no prefix."""
    return [1 + (i + 5 * seed + n_tokens // 32) % 97 for i in range(n_tokens)]


def _first_tokens_s(engine: Engine, prompts: Prompts) -> dict[int, float]:
    return {
        n: statistics.median(_seconds(_answer(engine, prompt, 1).result) for prompt in sample)
        for n, sample in prompts.items()
    }


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _tokens_per_s(engine: Engine, n_streams: int) -> float:
    """Of all streams together, their short prefills included."""
    answers = [_answer(engine, _prompt(16, seed), N_DECODED) for seed in range(n_streams)]
    seconds = _seconds(lambda: [answer.result() for answer in answers])
    return n_streams * N_DECODED / seconds


def _answer(engine: Engine, prompt: list[int], n_tokens: int) -> Answer:
    from keepwarm.text.request import Request, Sampling

    stops = dict.fromkeys(engine.model.tokenizer.eos_token_ids, -100.0)
    sampling = Sampling(max_tokens=n_tokens, temperature=0, logit_bias=stops)
    return engine.submit(Request(prompt=prompt, sampling=sampling))


def _machine_page(machine: Machine) -> str:
    """Machine and versions; no host name and no path."""
    rows = _rows(machine)
    for name in ("Home", "Block store", "Advice"):
        del rows[name]
    lines = "\n".join(f"- {name}: {value}" for name, value in rows.items())
    return f"# Keepwarm on {machine.device}\n\n{lines}\n"


def _figures_page(figures: Figures) -> str:
    lengths = list(figures.first_token_s["cold"])
    lines = [
        "| Time to first token (s) | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |",
        "|---|" + "--:|" * len(lengths),
    ]
    for name, seconds in figures.first_token_s.items():
        lines.append(f"| {name} | " + " | ".join(f"{s:.3f}" for s in seconds.values()) + " |")
    lines.append("")
    lines += [f"- {n} at once: {x:.1f} tokens/s" for n, x in figures.tokens_per_s.items()]
    if figures.predicted_tokens_per_s:
        lines.append(f"- 1 at once, predicted: {figures.predicted_tokens_per_s:.1f} tokens/s")
    return "\n".join(lines) + "\n"


def _tiers_page(remotes: list[RemoteReport]) -> str:
    """Without addresses, which are nobody else's business."""
    kinds = [urlsplit(remote.address).scheme for remote in remotes]
    lines = [f"- Shared tier, {k}: {_speed(r)}\n" for k, r in zip(kinds, remotes, strict=True)]
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
    machine: Machine, alone: list[str], places: dict[str, str], remotes: list[RemoteReport]
) -> Table:
    """`alone` are the models whose rows differ in a batch."""
    table = Table("", "", show_header=False, box=None)
    for name, value in (_rows(machine) | places).items():
        table.add_row(f"[bold]{name}[/bold]", Text(value))
    if alone:
        table.add_row("[bold]Not batched[/bold]", Text(", ".join(alone)))
    for remote in remotes:
        why = f": {remote.problem}" if remote.problem else ""
        told = Text(f"{remote.address}, {_speed(remote)}{why}")
        table.add_row("[bold]Shared tier[/bold]", told)
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
    return "none kept yet: the first start compiles them, which takes about a minute"
