"""The checkpoint that `keepwarm serve` loads: tiny, with a long context and scripted answers.

Asked about the file, it calls the client's tool that reads it; else it says a sentence. All of that
is in its weights and its template: the server is the program as it is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer

from tests.kit.agent_model import N_CONTEXT, SMALL, TOKENIZER
from tests.kit.checkpoints import EOS, make_config, make_weights, tokenizer_config
from tests.kit.scripted import lead

# Templates: one that writes no tools, and one of Qwen's kind.
PLAIN, TEMPLATE = (Path(__file__).with_name(f"{name}.jinja") for name in ("plain", "template"))
FILE = "notes.txt"  # the template looks for it
NOTE = "Four leaves of the tree are kept warm."
DO, SAY = "<|do|>", "<|say|>"
SAID = "The notes tell of four leaves, which stay warm all winter."


def write_model(
    directory: Path, tool: str, arguments: Mapping[str, Any], template: Path = TEMPLATE
) -> Path:
    """A checkpoint that calls this tool with these arguments."""
    call = "\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n"
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (DO, SAY)])
    tokenizer.add_tokens([AddedToken(call, special=False, normalized=False)])
    config = make_config(tokenizer, N_CONTEXT) | SMALL
    said = tokenizer.encode(SAID, add_special_tokens=False).tokens
    answers = ((DO, "<tool_call>", call, "</tool_call>", EOS), (SAY, *said, EOS))
    weights = lead(make_weights(config), _pairs(tokenizer, answers))
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {**tokenizer_config(N_CONTEXT), "chat_template": template.read_text().strip()}
    for name, value in (("config", config), ("tokenizer_config", described)):
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def _pairs(tokenizer: Tokenizer, answers: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """A token and the one after it, along every answer; no token stands in two places."""
    ids = [[tokenizer.token_to_id(part) for part in answer] for answer in answers]
    pairs = [pair for answer in ids for pair in pairwise(answer)]
    assert len(dict(pairs)) == len(pairs)
    return pairs
