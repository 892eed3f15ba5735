"""Options and output that several commands share."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from keepwarm import config
from keepwarm.errors import BadInput
from keepwarm.progress import shown
from keepwarm.units import printable

if TYPE_CHECKING:
    from keepwarm.engine.engine import Engine
    from keepwarm.models.load import Model
    from keepwarm.text.request import Event, Request

ModelName: TypeAlias = Annotated[
    str | None, typer.Option("--model", help="Model name, directory, .gguf file or hub id.")
]
SystemFile: TypeAlias = Annotated[
    Path | None, typer.Option("--system", help="File with the system prompt.")
]
MaxTokens: TypeAlias = Annotated[
    int | None, typer.Option("--max-tokens", help="Maximum answer length in tokens.")
]
Temperature: TypeAlias = Annotated[
    float | None, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")
]
Seed: TypeAlias = Annotated[int | None, typer.Option("--seed", help="Random seed.")]
KVBits: TypeAlias = Annotated[
    int | None,
    typer.Option("--kv-bits", help="Quantise keys and values to 2, 4 or 8 bits; 0: off."),
]
AgentId: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--agent",
        help="Conversation name; `chat` resumes it if it exists.",
    ),
]
NoCache: TypeAlias = Annotated[bool, typer.Option("--no-cache", help="Bypass the cache.")]

LEAST_COLUMNS = 16  # of a terminal, for a column that is shortened


def make_request(
    settings: config.Settings,
    seed: int | None,
    no_cache: bool,
    agent: str | None,
) -> Request:
    """A request without messages; raises BadInput for options out of range.

    Its KV options are the engine's, which are those of the settings.
    """
    from keepwarm.prefix.policy import Policy
    from keepwarm.text.request import Request, Sampling
    from keepwarm.text.sampling_rules import check_sampling

    if agent is not None and no_cache:
        raise BadInput("--agent and --no-cache cannot be combined: --no-cache stores nothing.")
    sampling = Sampling(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=seed)
    check_sampling(sampling, n_vocab=0)
    policy = Policy.NO_STORE if no_cache else Policy.READ_WRITE
    return Request(sampling=sampling, policy=policy, agent=agent)


@contextmanager
def open_engine(settings: config.Settings, request: Request) -> Iterator[Engine]:
    """An engine for requests like this one; on exit, waits until its blocks are on disk."""
    from keepwarm.cache.store import Budgets, Store
    from keepwarm.engine.engine import Engine

    budgets = replace(Budgets.of(settings), disk=request.policy.to_disk)
    with _log_discarded(), Store(budgets=budgets, settings=settings) as store:
        if request.agent is not None:
            store.check_agent(request.agent, exists=request.continues)
        with Engine(load_model(settings), store, settings=settings) as engine:
            yield engine


def load_model(settings: config.Settings) -> Model:
    """The model of the settings; says how far it is."""
    from keepwarm.models.load import load

    locate_model(settings.model, settings)
    with shown(f"loading {settings.model}") as line:
        return load(settings.model, settings, line.say)


def locate_model(name: str, settings: config.Settings, *, refresh: bool = False) -> Path:
    """The model's path. Once the hub sends it, a signal ends the process at once: unwound, the
    hub's library waits until its files are whole. What has come is kept for the next time.
    """
    from keepwarm.models.catalog import locate

    before: dict[signal.Signals, Any] = {}

    def end_by_signals(_: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            if callable(signal.getsignal(number)):  # and not ignored
                before[number] = signal.signal(number, _end_at_once)

    try:
        return locate(name, settings, refresh=refresh, announce=end_by_signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_at_once(number: int, _: FrameType | None) -> None:
    os.write(2, b"\nStopped.\n")  # below the bars
    os._exit(128 + number)


@contextmanager
def _log_discarded() -> Iterator[None]:
    """Without a handler, Python prints warnings to stderr, in the middle of the answer."""
    logger, handler = logging.getLogger("keepwarm"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def first_key(settings: config.Settings) -> str:
    """A shell expression for the first API key; in a file a name may stand before it."""
    if file := config.secret_file(settings.api_keys):
        return f"$(awk 'NF {{print $NF; exit}}' {shlex.quote(str(file))})"
    return "${KEEPWARM_API_KEYS%%,*}"


def system_messages(system: Path | None) -> list[dict[str, str]]:
    """The system prompt as a list of messages; empty if no file is given."""
    if system is None:
        return []
    try:
        content = system.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"The system prompt {system} is not UTF-8 text; convert it.") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(f"The system prompt {system} cannot be read: {why}.") from error
    return [{"role": "system", "content": content}]


def check_prompt(text: str) -> str:
    """Return the text unchanged; raise BadInput if it is blank or not valid Unicode."""
    if not text.strip():
        raise BadInput("The prompt is empty; enter some text.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput("The prompt is not UTF-8 text; convert it.") from error
    return text


def print_events(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events and print them: text to stdout, reasoning dimmed to stderr."""
    from keepwarm.text.request import Delta

    thinks = False
    for event in events:
        if isinstance(event, Delta):
            if event.reasoning:
                print_note(event.reasoning, end="")
            elif thinks and event.text:
                print_note("\n")
            print(event.text, end="", flush=True)
            thinks = bool(event.reasoning) or (thinks and not event.text)
        yield event


def print_note(text: str, end: str = "\n") -> None:
    """Print dimmed to stderr; stdout is for answers only."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(text, style="dim", markup=False, end=end)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    below: Collection[str] = (),
    shortened: str = "",
) -> None:
    """A table for people; in a pipe one for programs: values separated by tabs, none of them cut.

    The columns named in `below` stand under their row, whole. The one named by `shortened` has
    what the others leave of the terminal's width.
    """
    rows = [[printable(value) for value in row] for row in rows]
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            print("\t".join(row))
        return
    from rich.cells import cell_len

    shown = [index for index, name in enumerate(columns) if name not in below]
    lines = [[row[index] for index in shown] for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    left = shutil.get_terminal_size().columns - sum(widths) - 2 * len(widths)
    if shortened and left < 0:
        at = shown.index(columns.index(shortened))
        widths[at] = max(widths[at] + left, LEAST_COLUMNS)
    gap = "  " if shortened or left >= 0 else " "
    for line, row in zip(lines, (columns, *rows), strict=True):
        print(gap.join(map(_fitted, line, widths)).rstrip())
        under = [row[index] for index, name in enumerate(columns) if name in below]
        if below and row is not columns:
            print(f"  {'  '.join(filter(None, under))}")


def _fitted(text: str, width: int) -> str:
    from rich.cells import cell_len, set_cell_size

    is_long = cell_len(text) > width
    return f"{set_cell_size(text, width - 1)}…" if is_long else set_cell_size(text, width)


def check_parents(*files: Path | None) -> None:
    """Fail before measurements, which take minutes, and not when their results are written."""
    for file in filter(None, files):
        if file.is_dir():
            raise BadInput(f"{file} is a directory; name a file in it.")
        if not file.absolute().parent.is_dir():
            raise BadInput(f"The directory of {file} does not exist; create it first.")


@contextmanager
def file_errors(file: Path, done: str, then: str = "") -> Iterator[None]:
    """A file that cannot be read or written is one sentence, with what follows or to do."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(f"{file} cannot be {done}: {why}{then and f'; {then}'}.") from error
