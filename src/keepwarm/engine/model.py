"""A model ready to run: weights, tokenizer and what the prompt needs to know of them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from keepwarm import config as configuration
from keepwarm.config import Settings
from keepwarm.engine import builtin, gguf, hub
from keepwarm.engine.gguf_tokenizer import write_tokenizer
from keepwarm.engine.space import require_memory
from keepwarm.errors import BadModelFile, KeepwarmError, UnknownModel, UnsupportedModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True)
class Model:
    name: str  # as asked for
    path: Path  # the directory or .gguf file that the weights came from
    module: Any  # mlx-lm's model, an mlx.nn.Module
    tokenizer: Any  # mlx-lm's TokenizerWrapper
    config: dict[str, Any]
    n_context: int  # tokens, prompt and answer together

    def make_cache(self) -> list[Any]:
        """Fresh caches, one a layer, of the classes this architecture wants."""
        return make_prompt_cache(self.module)  # type: ignore[no-any-return]


class _Parts(NamedTuple):
    module: Any  # weights still lazy
    tokenizer: Any
    config: dict[str, Any]


def load(name: str, settings: Settings | None = None) -> Model:
    """The model of that name: built-in alias, directory, .gguf file or hub id.

    Downloads what is not here yet. All weights are in memory on return, so any thread may run it.
    """
    path = locate(name, settings or configuration.load())
    parts = _read_gguf(path) if path.is_file() else _read_directory(path)
    _settle(parts.module)
    weights: Any = tree_flatten(parts.module.parameters(), destination={})
    require_memory(name, sum(array.nbytes for array in weights.values()))
    mx.eval(weights)
    return Model(name, path, parts.module, parts.tokenizer, parts.config, n_context(parts.config))


def locate(name: str, settings: Settings, *, refresh: bool = False) -> Path:
    """Where the model lies on this machine, downloaded first if need be.

    A hub model that is here is taken as it is; `refresh` asks the hub for a newer one.
    """
    if name in builtin.BUILTINS:
        return builtin.fetch(builtin.BUILTINS[name], settings)
    path = Path(name).expanduser()
    if name and path.exists():
        return path.absolute()
    if hub.is_id(name):
        return (None if refresh else hub.cached(name)) or hub.fetch(name)
    raise UnknownModel(
        f"There is no model {name!r}; give {' or '.join(builtin.BUILTINS)}, a model directory, "
        f"a .gguf file or a hub id (org/name)."
    )


def read_config(path: Path) -> dict[str, Any]:
    """A model directory's config.json."""
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError as error:
        raise BadModelFile(f"{path} is no model directory: it has no config.json.") from error
    except ValueError as error:
        raise BadModelFile(f"{path}/config.json is not JSON ({error}).") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise BadModelFile(f"{path}/config.json does not say which model_type it is.")
    return config


def n_context(config: dict[str, Any]) -> int:
    """Longest sequence in tokens; a model that names no limit, as Mamba, has none."""
    for part in (config, config.get("text_config") or {}):
        for field in CONTEXT_FIELDS:
            if isinstance(part.get(field), int):
                return int(part[field])
    return sys.maxsize


def _read_gguf(path: Path) -> _Parts:
    checkpoint = gguf.read(path)
    with TemporaryDirectory() as temporary:
        write_tokenizer(path, checkpoint.metadata, Path(temporary))
        tokenizer = _read_tokenizer(Path(temporary), checkpoint.config, path)
    return _Parts(gguf.build(checkpoint), tokenizer, checkpoint.config)


def _read_directory(path: Path) -> _Parts:
    read_config(path)
    if not any(path.glob("model*.safetensors")):
        raise BadModelFile(f"{path} has no weights (model*.safetensors); fetch the model again.")
    if not any(any(path.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise BadModelFile(f"{path} has no tokenizer (tokenizer.json); fetch the model again.")
    module, config = _read_module(path)
    return _Parts(module, _read_tokenizer(path, config, path), config)


def _read_module(path: Path) -> tuple[Any, dict[str, Any]]:
    try:
        return load_model(path, lazy=True)  # type: ignore[no-any-return]
    except Exception as error:  # any model file may raise anything on a config it did not expect
        raise _refusal(path, error) from error


def _refusal(path: Path, error: Exception) -> KeepwarmError:
    reason = str(error).strip().partition("\n")[0].rstrip(".:")
    if "not supported" in reason or "custom module" in reason:
        kind = read_config(path)["model_type"]
        return UnsupportedModel(f"{path} is of architecture {kind!r}, which mlx-lm does not run.")
    return BadModelFile(f"{path} is not a whole model ({type(error).__name__}: {reason}).")


def _read_tokenizer(directory: Path, config: dict[str, Any], source: Path) -> Any:
    """The tokenizer's own code is never run, nor is anybody asked whether it may."""
    try:
        return load_tokenizer(
            directory, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id")
        )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadModelFile(f"The tokenizer of {source} cannot be read ({reason}).") from error


def _settle(module: Any) -> None:
    """On CPU all weights in fp32, where MLX is 10 to 40 times faster; on GPU as they ship."""
    if mx.default_device() == mx.gpu:
        return
    module.set_dtype(mx.float32)  # scales too: dequantising in fp16 would round
    dequantize_model(module)
    module.set_dtype(mx.float32)
