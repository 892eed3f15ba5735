"""`python -m benchmarks.day`: a coding agent's working day, on Keepwarm and beside it on others."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import mlx.core as mx
import typer

from benchmarks.day.cold import ColdComparison, compare_with_cold
from benchmarks.day.figures import Results
from benchmarks.day.hosts import Host, RequestRecord, expected_records, run
from benchmarks.day.model import LAST_FILE, Tokens, with_tools
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
from keepwarm.device import kernels
from keepwarm.engine.compilation import LONG
from keepwarm.errors import BadInput, KeepwarmError

Keep: TypeAlias = Callable[[Results], None]

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
    n_segments: int = 0  # that this run makes; 0: all

    @property
    def command(self) -> str:
        words = [
            f"--model {files.as_published(self.model)}",
            *[f"--shape {self.shape}"] * bool(self.shape),
        ]
        words += [f"--scale {self.scale}", f"--turns {self.turns}", f"--samples {self.samples}"]
        words += ["--one-by-one"] * self.one_by_one + [f"--only {name}" for name in self.only]
        words += [f"--rival {each.partition('=')[0]}=…" for each in self.rivals]
        return " ".join(["python -m benchmarks.day", *words])


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
    samples: Annotated[int, typer.Option(help="Answers compared with a cold run.")] = 10,
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
    folder: Annotated[
        Path | None,
        typer.Option(help="Of model and stores. The same command goes on where it was cut."),
    ] = None,
    segments: Annotated[
        int, typer.Option(min=0, help="End after so many, each from a start to an end of servers.")
    ] = 0,
    output: Annotated[Path | None, typer.Option("--json", help="Write all records.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables.")] = None,
) -> None:
    """Send a day of requests to every server, and say which goals hold."""
    check_parents(output, markdown)
    if segments and folder is None:
        raise BadInput("--segments needs --folder, with which the next run goes on.")
    name = model or config.load().model
    chosen = (only or [], rival or [])

    def keep(results: Results) -> None:
        if output is not None:
            output.write_text(json.dumps(results, indent=1) + "\n")

    plan = Plan(name, shape, scale, turns, samples, one_by_one, *chosen, n_segments=segments)
    results = measure(plan, keep, folder)
    print(tables(results))
    if markdown is not None:
        markdown.write_text(tables(results))


def measure(plan: Plan, keep: Keep, folder: Path | None = None) -> Results:
    """`keep` is given what is known after every step, so that a run that is cut has it."""
    with _folder_of(folder) as opened:
        return _Run(plan, opened, keep).run()


@contextmanager
def _folder_of(kept: Path | None) -> Iterator[Path]:
    """One that the next run goes on with, or one that is deleted."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="keepwarm-day-") as made:
        yield Path(made)


class _Run:
    """A day, or the segments of it that this run makes."""

    def __init__(self, plan: Plan, folder: Path, keep: Keep) -> None:
        self._plan, self._folder, self._keep = plan, folder, keep
        self._file = folder / "run.json"
        known = json.loads(self._file.read_text()) if self._file.is_file() else {}
        if known and known["command"] != plan.command:
            raise BadInput(f"{folder} has another day, of {known['command']!r}; take a new folder.")
        self._before = known
        self._began = time.monotonic() - known.get("seconds", 0)
        self.results: Results = {}

    def run(self) -> Results:
        plan, folder = self._plan, self._folder
        model = _make_model(plan, folder)
        prompts = PromptGenerator(model)
        steps = list(Day(prompts, plan.turns, plan.scale).steps())
        expected, stop_tokens = self._expected(steps, model), files.stop_tokens(model)
        hosts = [Host(server, stop_tokens) for server in _servers(plan, model, folder)]
        for host in hosts:
            if state := self._before.get("servers", {}).get(host.server.name):
                host.resume(state)
        tie = TIE_IN_HALF if mx.default_device() == mx.gpu else TIE
        known = {
            "tie": tie,
            "images": _n_images(steps),
            "kv_bytes_per_token": files.kv_bytes_per_token(model),
        }

        def show(line: str) -> None:
            print(line, file=sys.stderr, flush=True)
            self._note(known, hosts)

        n_left = plan.n_segments
        due = [host for host in hosts if host.n_steps < len(steps) and not host.failure]
        try:
            for host in due if kernels.are_compiled() else ():
                host.compile_kernels([prompts.text(LONG, n) for n in range(2)])
            for group in [[host] for host in hosts] if plan.one_by_one else [hosts]:
                n_left -= run(group, steps, expected, show, n_left)
                if plan.n_segments and not n_left:
                    break
        finally:
            for host in hosts:
                host.server.close()
        self._note(known, hosts)
        if any(host.n_steps < len(steps) and not host.failure for host in hosts):
            print("The same command goes on with the next segment.", file=sys.stderr)
            return self.results
        cold = keepwarm_server(model, folder, "cold")
        ours = [host for host in hosts if host.server.is_ours and plan.samples]
        compared = [compare_with_cold(host, cold, steps, plan.samples, tie) for host in ours]
        self._note(known, hosts, [each for found in compared for each in found])
        return self.results

    def _expected(self, steps: Sequence[Step], model: Path) -> list[list[RequestRecord]]:
        """Counted once: a whole day takes a minute."""
        file = self._folder / "expected.json"
        if not (self._before and file.is_file()):
            counted = expected_records(steps, Tokens(model))
            file.write_text(json.dumps([[asdict(one) for one in step] for step in counted]))
        return [[RequestRecord(**one) for one in step] for step in json.loads(file.read_text())]

    def _note(
        self, known: Results, hosts: Sequence[Host], cold: Sequence[ColdComparison] = ()
    ) -> None:
        head = {
            "command": self._plan.command,
            "date": datetime.now(UTC).date().isoformat(),
            "machine": self._before.get("machine") or describe_machine(),
            "model": self._plan.shape or Path(self._plan.model).name,
            "scale": self._plan.scale,
            "turns": self._plan.turns,
            "seconds": round(time.monotonic() - self._began),
        }
        self._before = {**self._before, "machine": head["machine"]}
        begun = [host for host in hosts if host.records or host.failure]
        servers = {host.server.name: host.as_json() for host in begun}
        found = [asdict(each) for each in cold]
        self.results = {**head, **known, "servers": servers, "cold": found}
        states = {host.server.name: host.as_state() for host in begun}
        self._file.write_text(json.dumps({**head, "servers": states}))
        self._keep(self.results)


def _make_model(plan: Plan, folder: Path) -> Path:
    made = folder / "model"
    if (made / LAST_FILE).is_file():  # by the run before
        return made
    for name in (made.name, "shape", "weights"):  # it was cut
        shutil.rmtree(folder / name, ignore_errors=True)
    source = files.model_directory(plan.model)
    if plan.shape:
        source = write_checkpoint(plan.shape, source, folder / "shape")
        release_memory()  # the servers need the GPU's
    source = files.full_precision(source, folder / "weights")
    return with_tools(source, made, ROOM * COMPACTED // plan.scale)


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
