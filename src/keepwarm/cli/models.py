"""`keepwarm models`: built-in models, and models on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from keepwarm import config
from keepwarm.errors import BadModelFile, KeepwarmError
from keepwarm.units import format_bytes

NAME_COLUMNS = 40  # a longer name moves the rest of its own row only


class ModelEntry(NamedTuple):
    name: str
    source: str  # built-in, hub or lm-studio
    path: str | None  # None: not pulled yet
    n_bytes: int | None
    architecture: str | None  # None with a path: it cannot be read
    n_context: int | None
    reason: str | None = None  # why it cannot be read


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List built-in models and models on this machine."""
    found = list(list_models(config.load()))
    if as_json:
        print(dumps([model._asdict() for model in found]))
        return
    for line in _lines(found):
        print(line)


def list_models(settings: config.Settings) -> Iterator[ModelEntry]:
    """Built-ins first, pulled or not, then the models of the hub's cache and of LM Studio."""
    from keepwarm.models import builtin, hub, lmstudio

    for name, known in builtin.BUILTINS.items():
        path = builtin.directory(known, settings)
        yield _entry(name, "built-in", path) if path.is_dir() else _absent(name)
    places = {
        "hub": hub.all_cached() | hub.all_gguf(),
        "lm-studio": lmstudio.all_found() | lmstudio.all_gguf(),
    }
    seen: set[str] = set()
    for source, models in places.items():
        yield from (_entry(n, source, path) for n, path in models.items() if n not in seen)
        seen |= models.keys()


def _entry(name: str, source: str, path: Path) -> ModelEntry:
    from keepwarm.models.catalog import n_context, read_config
    from keepwarm.models.gguf.architectures import describe

    files = path.rglob("*") if path.is_dir() else [path]
    n_bytes = sum(file.stat().st_size for file in files if file.is_file())
    try:
        model = read_config(path) if path.is_dir() else describe(path)
    except KeepwarmError as error:  # one broken model does not hide the others
        reason = None if isinstance(error, BadModelFile) and path.is_dir() else str(error)
        return ModelEntry(name, source, str(path), n_bytes, None, None, reason)
    return ModelEntry(name, source, str(path), n_bytes, model["model_type"], n_context(model))


def _absent(name: str) -> ModelEntry:
    return ModelEntry(name, "built-in", None, None, None, None)


def _lines(found: list[ModelEntry]) -> Iterator[str]:
    """A row for each, and under it where it is. Nothing is cut, so that it can be pasted."""
    rows = [("Model", "Size", "Context", "From", "Architecture"), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = min(widths[0], NAME_COLUMNS)
    heading, *lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    yield heading
    for model, line in zip(found, lines, strict=True):
        yield line
        yield f"  {model.path or f'to download it: keepwarm pull {model.name}'}"
        if model.reason:
            yield f"  {model.reason}"


def _row(model: ModelEntry) -> tuple[str, ...]:
    if model.path is None:
        return model.name, "", "", model.source, ""
    size, context = format_bytes(model.n_bytes or 0), f"{model.n_context or 0:,}"
    return model.name, size, context, model.source, model.architecture or "unreadable"
