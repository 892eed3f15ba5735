"""From a model's name to its path on this machine. Nothing here loads MLX or transformers."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from keepwarm.config import Settings
from keepwarm.errors import BadModelFile, UnknownModel
from keepwarm.models import builtin, hub, lmstudio

LOG = logging.getLogger(__name__)
WEIGHTS = ("*.safetensors", "*.gguf", "*.npz")
TOKENIZER = ("tokenizer*", "*.tiktoken", "vocab*", "merges.txt", "special_tokens_map.json",
             "added_tokens.json")  # fmt: skip
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
KINDS = {"model_type": str, "text_config": dict | None}
CONTEXTS = {"gemma3": 131_072}  # of types that are published without: the default of transformers


def locate(
    name: str,
    settings: Settings,
    *,
    refresh: bool = False,
    announce: Callable[[int], None] = lambda _: None,
) -> Path:
    """The path of the model on this machine; downloads it if missing.

    A model in the hub's cache, or LM Studio's, is used as it is; `refresh` asks the hub for a newer
    one, and replaces damaged files. `announce` is told the bytes of what is downloaded from it.
    """
    if name in builtin.BUILTINS:
        return builtin.fetch(builtin.BUILTINS[name], settings, refresh=refresh)
    if path := find_local(name):
        return path
    if hub.is_id(name):
        here = None if refresh else hub.cached(name) or lmstudio.find(name)
        return here or hub.fetch(name, announce)
    if path := find_gguf(name):
        return path
    raise _unknown(name)


def check_name(name: str) -> None:
    """Raise what `locate` raises for a name that can be no model; never downloads."""
    if name in builtin.BUILTINS or hub.is_id(name):
        return
    if not find_local(name) and not find_gguf(name):
        raise _unknown(name)


def _unknown(name: str) -> UnknownModel:
    return UnknownModel(
        f"There is no model {name!r}; use {' or '.join(builtin.BUILTINS)}, a model directory, "
        f"a .gguf file or a hub id (org/name); `keepwarm models --fit` proposes some."
    )


def find(name: str, settings: Settings) -> Path | None:
    """The path of a model by its name, if it is on this machine; never downloads."""
    if name in builtin.BUILTINS:
        path = builtin.directory(builtin.BUILTINS[name], settings)
        return path if path.is_dir() else None
    if hub.is_id(name):
        return hub.cached(name) or lmstudio.find(name)
    return find_gguf(name)


def find_gguf(name: str) -> Path | None:
    """The file `org/name/file.gguf` of LM Studio or the hub's cache."""
    if not name.endswith(".gguf"):
        return None
    return lmstudio.all_gguf().get(name) or hub.all_gguf().get(name)


def find_local(name: str) -> Path | None:
    """The directory or file of that name."""
    try:
        path = Path(name).expanduser()
        return path.absolute() if name and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, unknown user, or not a path at all
        return None


class FileStamp(NamedTuple):
    """Another one once the content is changed, but not by a new link or other permissions."""

    path: Path  # what its name leads to
    n_bytes: int
    mtime_ns: int


def file_stamps(path: Path) -> frozenset[FileStamp]:
    """Those of the files that a model is identified by."""
    patterns = (*WEIGHTS, *TOKENIZER, "config.json")
    found = [file for pattern in patterns for file in path.glob(pattern) if file.is_file()]
    return frozenset(map(_stamp, [path] if path.is_file() else found))


def _stamp(file: Path) -> FileStamp:
    status = file.stat()
    return FileStamp(file.resolve(), status.st_size, status.st_mtime_ns)


def read_config(path: Path) -> dict[str, Any]:
    """A model directory's config.json."""
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError as error:
        raise BadModelFile(
            f"{path} is not a model directory: it has no config.json; name the directory that has."
        ) from error
    except OSError as error:
        raise BadModelFile(f"{path}/config.json cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise BadModelFile(
            f"{path}/config.json is not valid JSON ({error}); download the model again."
        ) from error
    for name, kind in KINDS.items():
        if not isinstance(config, dict) or not isinstance(config.get(name), kind):
            raise BadModelFile(
                f"{path}/config.json has no {name} that can be read; download the model again."
            )
    return dict(config)


def read_generation_config(path: Path) -> dict[str, Any]:
    """A model directory's generation_config.json; empty if there is none, as with a .gguf."""
    try:
        config: dict[str, Any] = json.loads((path / "generation_config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        LOG.warning("%s/generation_config.json cannot be read (%s); ignored", path, error)
        return {}
    return config


def n_context(config: dict[str, Any]) -> int:
    """Context length in tokens; unlimited if it is not known, as for Mamba."""
    for part in (config, config.get("text_config") or {}):
        for field in CONTEXT_FIELDS:
            if isinstance(part.get(field), int):
                return int(part[field])
    return CONTEXTS.get(str(config.get("model_type")), sys.maxsize)
