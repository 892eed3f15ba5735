"""`python -m benchmarks.day`: a coding agent's working day, on Keepwarm and beside it on others."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import mlx.core as mx
import typer

from benchmarks.day.cold import ColdComparison, compare_with_cold
from benchmarks.day.figures import Results
from benchmarks.day.hosts import Host, expected_records, run
from benchmarks.day.model import Tokens, with_tools
from benchmarks.day.page import tables
from benchmarks.day.script import COMPACTED, LEAST_TURNS, TURNS, Day, Step
from benchmarks.requests import files
from benchmarks.requests.measure import describe_machine, release_memory
from benchmarks.requests.prompts import PromptGenerator
from benchmarks.requests.targets import (
    ServerProcess,
    keepwarm_server,
    mlx_lm_server,
    unwound_by_signals,
)
from benchmarks.shapes import write_checkpoint
from keepwarm import config
from keepwarm.cli.options import check_parents
from keepwarm.errors import BadInput, KeepwarmError

Keep: TypeAlias = Callable[[Results], None]

ROOT = Path(__file__).parents[2]
ROOM = 2  # times the longest conversation: what JSON and templates add is not divided
TIE, TIE_IN_HALF = 1e-3, 0.125  # of logprobs, in fp32 and in 16 bits


@dataclass(frozen=True)
class Plan:
    """What is run, as the command line says."""

    model: str
    shape: str
    scale: int
    turns: int
    samples: int
    one_by_one: bool
    only: Sequence[str]
    rivals: Sequence[str]  # NAME=COMMAND

    @property
    def command(self) -> str:
        words = [
            f"--model {_as_published(self.model)}",
            *[f"--shape {self.shape}"] * bool(self.shape),
        ]
        words += [f"--scale {self.scale}", f"--turns {self.turns}", f"--samples {self.samples}"]
        words += ["--one-by-one"] * self.one_by_one + [f"--only {name}" for name in self.only]
        words += [f"--rival {each.partition('=')[0]}=…" for each in self.rivals]
        return " ".join(["python -m benchmarks.day", *words])


def _as_published(model: str) -> str:
    """Without the folders of this machine."""
    path = Path(model)
    if not path.is_absolute():
        return model
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def day(
    *,
    model: Annotated[str, typer.Option(help="Model name or directory.")] = "",
    shape: Annotated[
        str, typer.Option(help="Random weights of this shape, with the model's vocabulary.")
    ] = "",
    scale: Annotated[int, typer.Option(min=1, help="Divide all lengths by this.")] = 8,
    turns: Annotated[
        int, typer.Option(min=LEAST_TURNS, help="Of the first person; events keep their place.")
    ] = TURNS,
    samples: Annotated[int, typer.Option(help="Answers compared with a cold run.")] = 8,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="Servers one after the other, for large models.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="keepwarm or mlx-lm; repeatable. Default: both.")
    ] = None,
    rival: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=COMMAND of another server, with {model} in it; --port is added. Repeatable."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write all records.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables.")] = None,
) -> None:
    """Send a day of requests to every server, and say which goals hold."""
    check_parents(output, markdown)
    name = model or config.load().model
    chosen = (only or [], rival or [])

    def keep(results: Results) -> None:
        if output is not None:
            output.write_text(json.dumps(results, indent=1) + "\n")

    results = measure(Plan(name, shape, scale, turns, samples, one_by_one, *chosen), keep)
    print(tables(results))
    if markdown is not None:
        markdown.write_text(tables(results))


def measure(plan: Plan, keep: Keep) -> Results:
    """`keep` is given what is known after every step, so that a run that is cut has it."""
    began = time.monotonic()
    head = {
        "command": plan.command,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "model": plan.shape or Path(plan.model).name,
        "scale": plan.scale,
        "turns": plan.turns,
    }
    results: Results = {}

    def keep_all(found: Results) -> None:
        nonlocal results
        results = {**head, "seconds": round(time.monotonic() - began), **found}
        keep(results)

    with tempfile.TemporaryDirectory(prefix="keepwarm-day-") as folder:
        _run(plan, Path(folder), keep_all)
    return results


def _run(plan: Plan, folder: Path, keep: Keep) -> None:
    model = _make_model(plan, folder)
    steps = list(Day(PromptGenerator(model), plan.turns, plan.scale).steps())
    expected, stop_tokens = expected_records(steps, Tokens(model)), files.stop_tokens(model)
    hosts = [Host(server, stop_tokens) for server in _servers(plan, model, folder)]
    tie = TIE_IN_HALF if mx.default_device() == mx.gpu else TIE
    known = {
        "tie": tie,
        "images": _n_images(steps),
        "kv_bytes_per_token": files.kv_bytes_per_token(model),
    }

    def note(cold: Sequence[ColdComparison] = ()) -> None:
        begun = [host for host in hosts if host.records or host.failure]
        servers = {host.server.name: host.as_json() for host in begun}
        keep({**known, "servers": servers, "cold": [asdict(each) for each in cold]})

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        note()

    try:
        for group in [[host] for host in hosts] if plan.one_by_one else [hosts]:
            run(group, steps, expected, show)
    finally:
        for host in hosts:
            host.server.close()
    cold = keepwarm_server(model, folder, "cold")
    ours = [host for host in hosts if host.server.is_ours and plan.samples]
    compared = [compare_with_cold(host, cold, steps, plan.samples, tie) for host in ours]
    note([each for found in compared for each in found])


def _make_model(plan: Plan, folder: Path) -> Path:
    source = files.model_directory(plan.model)
    if plan.shape:
        source = write_checkpoint(plan.shape, source, folder / "shape")
        release_memory()  # the servers need the GPU's
    source = files.full_precision(source, folder / "weights")
    return with_tools(source, folder / "model", ROOM * COMPACTED // plan.scale)


def _servers(plan: Plan, model: Path, folder: Path) -> Iterator[ServerProcess]:
    makers = {"keepwarm": keepwarm_server, "mlx-lm": mlx_lm_server}
    for name in plan.only or makers:
        if name not in makers:
            raise BadInput(f"{name!r} is not one of {', '.join(makers)}; use --rival for others.")
        yield makers[name](model, folder)
    for each in plan.rivals:
        name, _, command = each.partition("=")
        words = shlex.split(command.replace("{model}", str(model)))
        log = folder / f"{name}.log"
        yield ServerProcess(name, command, words, health="/v1/models", log=log)


def _n_images(steps: Sequence[Step]) -> int:
    """Messages that mention an image, each counted once."""
    messages = [message for step in steps for asked in step.requests for message in asked.messages]
    return len({m["content"] for m in messages if m["content"].startswith("[Image")})


def main() -> None:
    """A KeepwarmError is one sentence with exit code 2."""
    try:
        with unwound_by_signals():
            typer.run(day)
    except KeepwarmError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
