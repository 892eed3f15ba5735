"""`keepwarm models`: built-in models, models on this machine, and models that would fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from keepwarm import config
from keepwarm.cli.options import print_table
from keepwarm.errors import BadInput, BadModelFile, KeepwarmError
from keepwarm.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from keepwarm.models.choices import ModelChoice


class ModelEntry(NamedTuple):
    name: str
    source: str  # built-in, hub or lm-studio
    path: str | None  # None: not pulled yet
    n_bytes: int | None
    architecture: str | None  # None with a path: it cannot be read
    n_context: int | None
    reason: str | None = None  # why it cannot be read


def models(
    fit: Annotated[
        bool, typer.Option("--fit", help="List models to pull that fit into memory.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="For --fit: memory of another machine with a GPU, such as 32G."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List built-in models and models on this machine."""
    if fit or memory:
        _print_fitting(memory, as_json)
        return
    found = list(list_models(config.load()))
    if as_json:
        print(dumps([model._asdict() for model in found]))
        return
    _print(found)


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


def _print(found: list[ModelEntry]) -> None:
    """A row for each, and under it where it is. Nothing is cut, so that it can be pasted."""
    columns = ("Model", "Size", "Context", "From", "Architecture", "Path", "Note")
    print_table(columns, [_row(model) for model in found], below=columns[-2:])


def _row(model: ModelEntry) -> tuple[str, ...]:
    if model.path is None:
        pull = f"to download it: keepwarm pull {model.name}"
        return model.name, "", "", model.source, "", "", pull
    size, context = format_bytes(model.n_bytes or 0), f"{model.n_context or 0:,}"
    what = (model.source, model.architecture or "unreadable", model.path, model.reason or "")
    return model.name, size, context, *what


def _print_fitting(memory: str | None, as_json: bool) -> None:
    from keepwarm.models.choices import ModelMemory, all_choices

    machine = ModelMemory(_parsed(memory), on_cpu=False) if memory else ModelMemory.here()
    fitting, n_bytes = machine.fitting(), machine.n_bytes
    if as_json:
        rows = [choice._asdict() | {"n_tokens": choice.n_tokens(n_bytes)} for choice in fitting]
        print(dumps(rows))
        return
    print_table(
        ("Model", "Weights", "Tokens", "Licence"), [_fitting(each, n_bytes) for each in fitting]
    )
    if not sys.stdout.isatty():
        return
    computed = "in fp32, as on every CPU" if machine.on_cpu else "on a GPU"
    share = f"{len(fitting)} of {len(all_choices())} models fit"
    print(f"\n{share} into {format_bytes(n_bytes)} of memory, computed {computed}.")
    print("Tokens: what fits beside the weights, of the model's context.")
    print("* Not loaded by us: computed from public configs (docs/models.md).")
    print("To download one: keepwarm pull MODEL")


def _parsed(memory: str) -> int:
    try:
        return parse_bytes(memory)
    except ValueError as error:
        raise BadInput(f"--memory is {memory!r}; it must be a size, such as 32G.") from error


def _fitting(choice: ModelChoice, n_bytes: int) -> tuple[str, ...]:
    tokens = f"{choice.n_tokens(n_bytes) // 1024}k/{choice.n_context // 1024}k"
    weights = f"{format_bytes(choice.weights_bytes)}{'' if choice.is_loaded else '*'}"
    return choice.id, weights, tokens, choice.licence
