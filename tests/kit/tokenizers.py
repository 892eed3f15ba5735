"""The kit's byte-level tokenizer with the special tokens and templates of many model families."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken

from tests.kit.checkpoints import CHATML, make_tokenizer, tokenizer_config

WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


def make(
    directory: Path,
    *,
    template: str | None = WITH_TOOLS,
    tokens: Sequence[str] = (),
    special: Sequence[str] = (),
    parser: str | None = None,
) -> Any:
    """mlx-lm's wrapper of the tiny tokenizer with these tokens added and this tool parser."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=False) for token in tokens])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {**tokenizer_config(), "chat_template": template, "tool_parser_type": parser}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load_tokenizer(directory)
