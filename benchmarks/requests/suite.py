"""The list of workloads, and running them on every target in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.requests import files, targets
from benchmarks.requests.measure import describe_machine
from benchmarks.requests.prompts import PromptGenerator
from benchmarks.requests.report.results import Note, Record, Results
from benchmarks.requests.run import Sizes, WorkloadRun
from benchmarks.requests.targets import Target, error_line
from benchmarks.requests.workloads import agents, chat, lengths, overhead, streams, turns
from keepwarm.errors import BadInput, KeepwarmError

Work: TypeAlias = Callable[[WorkloadRun], Iterator[Record]]
ShowStatus: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Workload:
    about: str
    work: Work
    has_own_targets: bool = False  # runs once, on servers that it starts


WORKLOADS = {
    "lengths": Workload(
        "time to first token by prompt length: cold, repeated, follow-up, restarted", lengths.run
    ),
    "pipeline": Workload("a conversation of six turns, with and without the cache", turns.pipeline),
    "restart": Workload("a long conversation, right after a restart and later", turns.restart),
    "agents": Workload("ten agents with one system prompt, in turn and all at once", agents.run),
    "trace": Workload("recorded turns of coding agents, scaled down", turns.trace),
    "late": Workload("a short request while another decodes", streams.late),
    "prefill": Workload("a long prompt beside a running stream", streams.prefill),
    "streams": Workload("tokens per second of one to eight streams", streams.streams),
    "persistence": Workload("decoding with and without saving blocks", streams.persistence),
    "chat": Workload("one chat prompt in five situations, and its bytes on disk", chat.run),
    "overhead": Workload("what the server adds to the engine", overhead.run, has_own_targets=True),
    "stress": Workload("all kinds of requests at once, some cancelled", streams.stress),
}


def select(names: Sequence[str]) -> list[str]:
    """Check the names; all workloads if none is given."""
    for name in names:
        if name not in WORKLOADS:
            raise BadInput(f"{name!r} is not a workload; choose from {', '.join(WORKLOADS)}.")
    return list(dict.fromkeys(names)) or list(WORKLOADS)


def measure(
    names: Sequence[str], wanted: Sequence[str], model: str, sizes: Sizes, command: str
) -> Results:
    """Run the workloads on the targets, with a progress bar on standard error."""
    source = files.model_directory(model)
    with tempfile.TemporaryDirectory(prefix="keepwarm-bench-") as temporary:
        folder = Path(temporary)
        shared = files.full_precision(source, folder / "model") if "mlx-lm" in wanted else source
        found = [targets.make(name, shared, folder) for name in dict.fromkeys(wanted)]
        with started(found):
            own = [targets.keepwarm_server(shared, folder)]  # started by the workload itself
            steps = list(in_turn(names, found, own))
            records = run_all(steps, run_factory(shared, folder, sizes))
    return Results(
        command=command,
        date=datetime.now(UTC).date().isoformat(),
        model=source.name,
        samples=sizes.samples,
        machine=describe_machine(),
        targets={target.name: target.about for _, target in steps},
        records=records,
    )


def in_turn(
    names: Sequence[str], found: Sequence[Target], own: Sequence[Target]
) -> Iterator[tuple[str, Target]]:
    """Whoever was first at a workload is last at the next."""
    order = list(found)
    for name in names:
        if WORKLOADS[name].has_own_targets:
            yield from ((name, target) for target in own)
        else:
            yield from ((name, target) for target in order)
            order.reverse()


RunFactory: TypeAlias = Callable[[str, Target, ShowStatus], WorkloadRun]


def run_factory(model: Path, folder: Path, sizes: Sizes) -> RunFactory:
    """A function that makes the run of one workload on one target."""
    prompts, seeds = PromptGenerator(model), count()
    stops, kv_bytes = files.stop_tokens(model), files.kv_bytes_per_token(model)

    def make_run(name: str, target: Target, show_status: ShowStatus) -> WorkloadRun:
        return WorkloadRun(
            name, target, prompts, sizes, model, folder, stops, kv_bytes, seeds, show_status
        )

    return make_run


@contextmanager
def started(found: Sequence[Target]) -> Iterator[None]:
    """Start all targets; close them at the end."""
    try:
        for target in found:
            target.start()
        yield
    finally:
        for target in found:
            target.close()


def run_all(steps: Sequence[tuple[str, Target]], make_run: RunFactory) -> list[Record]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    records: list[Record] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(steps))
        for name, target in steps:

            def show_status(what: str, name: str = name, target: Target = target) -> None:
                progress.update(bar, description=f"{name} on {target.name}: {what}")

            try:
                records += _attempt(make_run(name, target, show_status), WORKLOADS[name].work)
            except KeyboardInterrupt:  # keep what was measured so far
                return [*records, Note(name, target.name, "interrupted here; the rest was not run")]
            progress.advance(bar)
    return records


def _attempt(run: WorkloadRun, work: Work) -> list[Record]:
    """The records of a workload; a failure becomes a note and the target is restarted."""
    try:
        return list(work(run))
    except KeepwarmError as error:
        if not WORKLOADS[run.workload].has_own_targets:
            _revive(run.target)
        return [Note(run.workload, run.target.name, f"failed: {error_line(error)}")]


def _revive(target: Target) -> None:
    if target.restart_method:
        target.kill()
        target.start()
