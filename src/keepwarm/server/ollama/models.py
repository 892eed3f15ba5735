"""Models as Ollama's clients see them: lists, details, capabilities, downloads. Reads files."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.concurrency import run_in_threadpool

from keepwarm.concurrency import in_background
from keepwarm.config import Settings
from keepwarm.errors import BadInput, Busy, Forbidden, KeepwarmError
from keepwarm.models import builtin, hub
from keepwarm.models.catalog import read_config
from keepwarm.server.http.body import Fields
from keepwarm.server.http.problems import ollama_body, problem_of
from keepwarm.server.http.sse import line
from keepwarm.server.models.models import LATEST, ListedModel, Models, plain
from keepwarm.server.openai.completions import fill_in_of

if TYPE_CHECKING:
    from keepwarm.engine.engine import Engine

BEAT_S = 1.0
NEVER = "9999-12-31T23:59:59Z"
MOST_LEFT_S = 1e10  # dates end with the year 9999
WEIGHTS = ("*.safetensors", "*.gguf")
INDEX = "model.safetensors.index.json"  # mlx-lm writes the number of parameters into it
EMBEDDER_FILES = ("modules.json", "config_sentence_transformers.json")
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Fields of a config under the names that GGUF has for them.
KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}


class ModelFacts(NamedTuple):
    """A model as its files describe it."""

    listed: ListedModel
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    engine: Engine | None

    @classmethod
    def of(cls, models: Models, listed: ListedModel) -> ModelFacts:
        slot = models.known(listed.name)
        engine = slot.host.loaded if slot else None
        path, config = listed.path, {} if engine is None else engine.model.config
        with suppress(KeepwarmError):
            config = config or (read_config(path) if path and path.is_dir() else {})
        files = (path,) if path and path.is_file() else _weights(path)
        return cls(listed, config, files, engine)

    @property
    def name(self) -> str:
        """With a tag, as Ollama's clients know names."""
        name = self.listed.name
        return name if ":" in name.rpartition("/")[2] else name + LATEST

    @property
    def modified_at(self) -> str:
        when = max((found.st_mtime for _, found in self._here()), default=self.listed.created)
        return _iso(when)

    @property
    def size(self) -> int:
        return sum(found.st_size for _, found in self._here())

    def _here(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The files, without those that were deleted meanwhile."""
        for file in self.files:
            with suppress(FileNotFoundError):
                yield file, file.stat()

    @property
    def digest(self) -> str:
        parts = [json.dumps(self.config, sort_keys=True, default=str)]
        parts += [f"{file.name} {found.st_size}" for file, found in self._here()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def n_parameters(self) -> int | None:
        path = self.listed.path
        with suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads((path / INDEX).read_text())["metadata"] if path else {}
            return int(about["total_parameters"])
        return None

    @property
    def architecture(self) -> str:
        return str(self.config.get("model_type", ""))

    def summary(self) -> Fields:
        named = {"name": self.name, "model": self.name}
        return {**named, "digest": self.digest, "details": self.details()}

    def details(self) -> Fields:
        n = self.n_parameters
        is_gguf = any(file.suffix == ".gguf" for file in self.files)
        return {
            "parent_model": "",
            "format": "gguf" if is_gguf else "safetensors",
            "family": self.architecture,
            "families": [self.architecture] if self.architecture else [],
            "parameter_size": "" if n is None else f"{n / 1e9:.1f}B",
            "quantization_level": _quantization(self.config),
        }

    def info(self) -> Fields:
        """Under GGUF's names, as far as the config has them."""
        kind, text = self.architecture, self.config.get("text_config") or {}
        fields = {**text, **self.config}
        info: Fields = {"general.architecture": kind}
        if self.n_parameters is not None:
            info["general.parameter_count"] = self.n_parameters
        if self.listed.n_context is not None:
            info[f"{kind}.context_length"] = self.listed.n_context
        known = {name: fields[field] for field, name in KEYS.items() if field in fields}
        return info | {f"{kind}.{name}": value for name, value in known.items()}

    def capabilities(self, settings: Settings) -> list[str]:
        """Tools are offered to every model; some of the rest shows only when it is loaded."""
        found = ["completion", "tools"]
        if any(self._has(file) for file in EMBEDDER_FILES):
            found.append("embedding")
        if self.engine is None:
            return [*found, *(["thinking"] if "<think>" in self.template() else [])]
        if self.engine.preparer.markup.has_reasoning:
            found.append("thinking")
        if settings.raw_special_tokens and fill_in_of(self.engine.model.tokenizer):
            found.append("insert")
        return found

    def _has(self, file: str) -> bool:
        return self.listed.path is not None and (self.listed.path / file).is_file()

    def template(self) -> str:
        if self.engine is not None:
            written = self.engine.model.tokenizer.chat_template
            return written if isinstance(written, str) else ""
        return _template(self.listed.path) if self.listed.path else ""

    def parameters(self) -> str:
        """What holds where a request is silent, as in a Modelfile."""
        rules = self.listed.sampling._asdict()
        rules["repeat_penalty"] = rules.pop("repetition_penalty")
        return "\n".join(f"{name:<30} {value:g}" for name, value in rules.items())


def listed_models(models: Models) -> list[Fields]:
    return [
        {**facts.summary(), "modified_at": facts.modified_at, "size": facts.size}
        for facts in _all(models)
    ]


def loaded_models(models: Models) -> list[Fields]:
    return [
        {
            **facts.summary(),
            "size": facts.engine.model.n_bytes,
            "size_vram": facts.engine.model.n_bytes,
            "expires_at": _expires_at(models, facts.listed.name),
            "context_length": facts.engine.model.n_context,
        }
        for facts in _all(models)
        if facts.engine is not None
    ]


def show(models: Models, settings: Settings, name: str) -> Fields:
    """The model that answers requests of this name; raises if none does."""
    facts = ModelFacts.of(models, models.answering(name))
    return {
        "modelfile": f"FROM {facts.name}",
        "parameters": facts.parameters(),
        "template": facts.template(),
        "details": facts.details(),
        "model_info": facts.info(),
        "capabilities": facts.capabilities(settings),
        "modified_at": facts.modified_at,
    }


def _all(models: Models) -> Iterator[ModelFacts]:
    return (ModelFacts.of(models, listed) for listed in models.listed())


def _weights(path: Path | None) -> tuple[Path, ...]:
    if path is None:
        return ()
    return tuple(sorted(file for pattern in WEIGHTS for file in path.glob(pattern)))


def _quantization(config: Mapping[str, Any]) -> str:
    quantised = config.get("quantization") or config.get("quantization_config") or {}
    if isinstance(bits := quantised.get("bits"), int):
        return f"Q{bits}"
    text = config.get("text_config") or {}
    named = config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype")
    return DTYPES.get(str(named), "")


def _template(path: Path) -> str:
    with suppress(OSError, ValueError):
        return (path / "chat_template.jinja").read_text()
    with suppress(OSError, ValueError, KeyError, TypeError):
        written = json.loads((path / "tokenizer_config.json").read_text())["chat_template"]
        return written if isinstance(written, str) else ""
    return ""


def _expires_at(models: Models, name: str) -> str:
    slot = models.known(name)
    until = models.slots.kept_until(slot) if slot else math.inf
    left_s = until - time.monotonic()
    return NEVER if left_s > MOST_LEFT_S else _iso(time.time() + left_s)


def _iso(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")


# Downloads


class Pulls:
    """What is being downloaded. A client that goes away does not end it, nor does it hold up the
    server's end: the hub's files are complete or missing."""

    def __init__(self, fetch: Callable[..., object]) -> None:
        """`fetch` is given a name, and `announce` to say how many bytes it has."""
        self._fetch = fetch
        self._name = ""  # of the latest
        self._n_bytes = 0  # 0: not known
        self._pulling: Future[object] | None = None

    def start(self, name: str) -> Future[object]:
        """For the event loop: done when the model is here; a second client waits for the same."""
        if self._pulling is None or self._pulling.done():
            self._name, self._n_bytes = name, 0
            fetch = partial(self._fetch, name, announce=self._announce)
            self._pulling = in_background(fetch, "keepwarm-pull")
        elif self._name != name:
            raise Busy(f"{self._name} is being downloaded; retry when that is done.")
        return self._pulling

    def _announce(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes

    def so_far(self) -> Fields | None:
        """What is being downloaded, and how many of its bytes are here. Reads files."""
        if self._pulling is None or self._pulling.done():
            return None
        n_here = min(self._n_bytes, hub.n_bytes_here(self._name))
        return {
            "status": f"pulling {self._name}",
            "total": self._n_bytes,  # 0: not known yet
            "completed": n_here,
        }


def checked_name(models: Models, name: str) -> str:
    """A model that may be downloaded, and loaded then; raises if it is none."""
    name = plain(name)
    if name not in builtin.BUILTINS and not hub.is_id(name):
        raise BadInput(
            f"{name!r} cannot be downloaded; use a hub id (org/name), as "
            "`keepwarm models` shows them."
        )
    if not models.may_load(name):
        raise Forbidden(
            f"Requests may not load {name!r} here; start the server with it, or name it in "
            "on_demand."
        )
    return name


async def progress(pulls: Pulls, pulling: Future[object]) -> AsyncIterator[bytes]:
    """A line a second, so that the client knows that it goes on."""
    waiting = asyncio.wrap_future(pulling)
    yield line({"status": "pulling manifest"})
    while not (await asyncio.wait({waiting}, timeout=BEAT_S))[0]:
        if found := await run_in_threadpool(pulls.so_far):
            yield line(found)
    error = waiting.exception()
    yield line({"status": "success"} if error is None else ollama_body(problem_of(error)))
