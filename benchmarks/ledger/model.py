"""A tiny model whose every token is a word, and its tokens counted without Keepwarm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import mlx.core as mx
from tokenizers import Tokenizer

from benchmarks.requests.files import tiny_like

SOURCE = Path(__file__).parents[1] / "models" / "attention"
WORDS = (
    *("the", "a", "and", "then", "in", "its", "over", "is"),
    *("that", "for", "not", "this", "file", "name", "list", "value"),
)


def write_model(folder: Path) -> Path:
    """Random weights; only words have a logit other than 0, in pairs of opposite ones, so that one
    of them is the most likely token at every step. A client counts tokens by counting words.
    """
    target = tiny_like(SOURCE, folder)
    tokens, weights = Tokens(target), mx.load(str(target / "model.safetensors"))
    assert isinstance(weights, dict)
    ids = [tokens.of_text(f" {word}") for word in WORDS]
    half = mx.random.normal((len(ids) // 2, weights["lm_head.weight"].shape[1]))
    head = mx.zeros_like(weights["lm_head.weight"])
    head[mx.array([each for (each,) in ids])] = mx.concatenate([half, -half])
    written = folder / "written.safetensors"
    mx.save_safetensors(str(written), weights | {"lm_head.weight": head}, {"format": "mlx"})
    written.replace(target / "model.safetensors")
    return target


class Tokens:
    """The tokens of prompts, by the files of the model."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        template = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
        self._template = jinja2.Template(template)

    def of_text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def of_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.of_text(self._template.render(messages=messages, add_generation_prompt=True))
