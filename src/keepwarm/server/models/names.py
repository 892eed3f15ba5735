"""What requests may call a model, and which they may load."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from keepwarm.config import Settings
from keepwarm.errors import BadInput
from keepwarm.models import builtin, hub
from keepwarm.models.catalog import check_name, find, find_local

LATEST = ":latest"  # Ollama writes it behind names that have no other tag


def plain(name: str) -> str:
    return name.removesuffix(LATEST)


class NamedModel(NamedTuple):
    """A model by the name that requests use, and by what it is found."""

    name: str
    source: str

    @classmethod
    def parse(cls, text: str) -> NamedModel:
        """`name=model`, or a model that is its own name; a path may have an equals sign."""
        name, equals, source = map(str.strip, text.partition("="))
        is_named = equals and name and source and "/" not in name
        return cls(name, source) if is_named else cls(text, text)


def key_of(source: str) -> str:
    """The same for every way to write a model's path."""
    path = None if source in builtin.BUILTINS else find_local(source)
    return source if path is None else str(path.resolve())


def configured(settings: Settings) -> list[NamedModel]:
    """The models that the settings name, the first one first."""
    texts = [settings.model, *settings.listed("more_models")]
    models = list(dict.fromkeys(map(NamedModel.parse, texts)))
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"Two models are called {name!r}; give one another name: NAME=MODEL.")
    for name in settings.listed("pinned_models"):
        if name not in names:
            known = ", ".join(map(repr, names))
            raise BadInput(f"pinned_models names {name!r}, and the server has {known}; choose one.")
    return models


def check_models(settings: Settings) -> None:
    """Refuse names that can be no model, before anything is started for them."""
    for model in configured(settings):
        check_name(model.source)


class OnDemand:
    """Models on this machine that the operator lets requests load. Reads files; never downloads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._patterns = settings.listed("on_demand")

    def allows(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def find(self, name: str) -> Path | None:
        if not self.allows(name):
            return None
        path = find(name, self._settings)
        if path is None and self._settings.allow_model_paths and name.startswith(("/", "~")):
            path = find_local(name)
        return path and path.resolve()

    def names(self) -> Iterator[str]:
        """Those that have a name; a path is none."""
        if self._patterns:
            known = [name for name in builtin.BUILTINS if find(name, self._settings)]
            yield from filter(self.allows, [*known, *hub.all_cached()])
