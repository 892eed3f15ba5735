"""Models that LM Studio has downloaded: `publisher/model` in its folder, or a .gguf file there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

FOLDERS = (".lmstudio/models", ".cache/lm-studio/models")  # in the user's home; the second is older
INDEX = "model.safetensors.index.json"


def find(name: str) -> Path | None:
    """The directory of `publisher/model`, if all its files are there."""
    return all_found().get(name)


def all_found() -> dict[str, Path]:
    """Every complete model by its name, which is mostly that of the hub."""
    return {f"{path.parent.name}/{path.name}": path for path in reversed(list(_directories()))}


def all_gguf() -> dict[str, Path]:
    """Every GGUF file, as `publisher/model/file.gguf`."""
    files = [path for folder in _folders() for path in sorted(folder.glob("*/*/*.gguf"))]
    return {"/".join(path.parts[-3:]): path for path in reversed(files)}


def _folders() -> Iterator[Path]:
    yield from (Path.home() / each for each in FOLDERS)


def _directories() -> Iterator[Path]:
    for folder in _folders():
        yield from (
            path.parent for path in sorted(folder.glob("*/*/config.json")) if _is_whole(path)
        )


def _is_whole(config: Path) -> bool:
    """Whether no part of the weights is missing, as while LM Studio downloads."""
    directory = config.parent
    try:
        parts = set(json.loads((directory / INDEX).read_text())["weight_map"].values())
    except FileNotFoundError:
        return any(directory.glob("model*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((directory / str(part)).is_file() for part in parts)
