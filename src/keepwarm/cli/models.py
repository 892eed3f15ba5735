"""`keepwarm models`: built-in models and models on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from keepwarm import config
from keepwarm.errors import BadModelFile


class ModelEntry(NamedTuple):
    name: str
    source: str  # built-in, hub or lm-studio
    path: str | None  # None: not pulled yet
    n_bytes: int | None
    architecture: str | None  # None with a path: config.json is unreadable
    n_context: int | None


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List built-in models and models on this machine."""
    found = list(list_models(config.load()))
    if as_json:
        print(dumps([model._asdict() for model in found]))
    else:
        Console().print(_table(found))


def list_models(settings: config.Settings) -> Iterator[ModelEntry]:
    """Built-ins first, pulled or not, then the models of the hub's cache and of LM Studio."""
    from keepwarm.models import builtin, hub, lmstudio

    for name, known in builtin.BUILTINS.items():
        path = builtin.directory(known, settings)
        yield _entry(name, "built-in", path) if path.is_dir() else _absent(name)
    cached = hub.all_cached()
    for name, path in cached.items():
        yield _entry(name, "hub", path)
    for name, path in lmstudio.all_found().items():
        if name not in cached:
            yield _entry(name, "lm-studio", path)


def _entry(name: str, source: str, path: Path) -> ModelEntry:
    from keepwarm.models.catalog import n_context, read_config

    n_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    try:
        model = read_config(path)
    except BadModelFile:  # one broken model does not hide the others
        return ModelEntry(name, source, str(path), n_bytes, None, None)
    return ModelEntry(name, source, str(path), n_bytes, model["model_type"], n_context(model))


def _absent(name: str) -> ModelEntry:
    return ModelEntry(name, "built-in", None, None, None, None)


def _table(found: list[ModelEntry]) -> Table:
    from keepwarm.units import format_bytes

    table = Table("Model", "From", "Size", "Architecture", "Context", "Path", box=None)
    for model in found:
        if model.path is None:
            table.add_row(model.name, model.source, "", "", "", f"keepwarm pull {model.name}")
        else:
            size, context = format_bytes(model.n_bytes or 0), f"{model.n_context or 0:,}"
            kind = model.architecture or "unreadable"
            table.add_row(model.name, model.source, size, kind, context, model.path)
    return table
