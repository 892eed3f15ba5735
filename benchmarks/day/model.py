"""The model that all servers load, and the tokens of prompts as they count them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import load as load_tokenizer

from benchmarks.day.script import DayRequest
from benchmarks.day.template import TOOLS_CHATML
from benchmarks.requests.client import Message
from keepwarm.models.catalog import read_config

LAST_FILE = "tokenizer_config.json"  # that `with_tools` writes


class Tokens:
    """Counts prompts as the servers do, and what each has in common with those before."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = load_tokenizer(model)
        self._sent: list[Any] = []

    def count(self, request: DayRequest) -> tuple[int, int]:
        """Tokens of its prompt, and how many no prompt before began with."""
        messages = [_with_parsed_calls(message) for message in request.messages]
        options = {"tools": list(request.tools) or None, "add_generation_prompt": True}
        ids = np.array(self._tokenizer.apply_chat_template(messages, **options), np.int32)
        n_known = max((_n_common(ids, before) for before in self._sent), default=0)
        self._sent.append(ids)
        return len(ids), max(1, len(ids) - n_known)


def _n_common(one: Any, other: Any) -> int:
    n = min(len(one), len(other))
    differs = one[:n] != other[:n]
    return int(differs.argmax()) if differs.any() else n


def _with_parsed_calls(message: Message) -> dict[str, Any]:
    """Servers parse the arguments of calls before a template writes them."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    parsed = [{"function": {**call, "arguments": json.loads(call["arguments"])}} for call in calls]
    return {**message, **({"tool_calls": parsed} if parsed else {})}


def with_tools(source: Path, folder: Path, n_context: int) -> Path:
    """The model with a template that writes tools, if its own does not, and with a long context."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name not in ("config.json", "tokenizer_config.json"):
            (folder / file.name).symlink_to(file.resolve())
    known = read_config(source)
    longer = max(n_context, known.get("max_position_embeddings", 0))
    _write(folder / "config.json", {**known, "max_position_embeddings": longer})
    described = json.loads((source / "tokenizer_config.json").read_text())
    template = described.get("chat_template") or ""
    if (own := source / "chat_template.jinja").is_file():
        template = own.read_text()
    if "tools" not in template:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        template = TOOLS_CHATML
    described |= {"chat_template": template, "model_max_length": longer}
    _write(folder / LAST_FILE, described)
    return folder


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value))
