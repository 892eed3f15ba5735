"""A tiny real checkpoint that generates the answers a test has scripted.

Its template ends every request for an answer with a token that counts the answers before; its
weights lead from that token to one token that is the whole answer, and from there to the end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer

from keepwarm.text.tools import call_text
from tests.kit.checkpoints import (
    CHATML,
    EOS,
    THINKING_CHATML,
    make_config,
    make_tokenizer,
    make_weights,
    tokenizer_config,
)

Pairs: TypeAlias = list[tuple[int, int]]  # a token and the one after it
MAX_ANSWERS = 24
CERTAINTY = 8  # so that a client that asks for a temperature gets the same
TEMPLATE = (
    "{% set ns = namespace(n=0) %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|step' ~ ns.n ~ '|>' }}{% set ns.n = ns.n + 1 %}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<|step' ~ ns.n ~ '|>' }}{% endif %}"
)


def call(name: str, **arguments: Any) -> str:
    """An answer that calls a tool, in the default syntax."""
    return call_text(name, json.dumps(arguments))


def write_scripted(
    directory: Path,
    answers: Sequence[str],
    n_context: int = 16384,
    *,
    tokenizer: Tokenizer | None = None,
    under_grammar: bool = False,
) -> Path:
    """A checkpoint whose k-th answer of a conversation is `answers[k]`; further ones are empty.

    `under_grammar`: calls are two tokens, because grammars take one in angle brackets for special.
    """
    tokenizer = tokenizer or make_tokenizer()
    steps = [f"<|step{number}|>" for number in range(MAX_ANSWERS)]
    tokenizer.add_special_tokens([AddedToken(step, special=True) for step in steps])
    parts = [answer.removesuffix(">") if under_grammar else answer for answer in answers]
    said = list(dict.fromkeys(parts))
    tokenizer.add_tokens([AddedToken(answer, special=False, normalized=False) for answer in said])
    script = _script(tokenizer, steps, parts)
    if under_grammar:
        script = _with_ends(tokenizer, script, dict(zip(parts, answers, strict=True)))
    return _write(directory, tokenizer, script, TEMPLATE, n_context)


def _with_ends(tokenizer: Tokenizer, script: Pairs, whole: dict[str, str]) -> Pairs:
    """The script with the last letter of answers that lack it."""
    last, eos = tokenizer.token_to_id(">"), tokenizer.token_to_id(EOS)
    cut = {tokenizer.token_to_id(part) for part, answer in whole.items() if part != answer}
    return [*((token, last if token in cut else after) for token, after in script), (last, eos)]


def write_endless(directory: Path, n_context: int = 16384) -> Path:
    """A checkpoint that says one letter for ever, after a question mark or a generation prompt."""
    tokenizer = make_tokenizer()
    letter, *before = (tokenizer.encode(text).ids[-1] for text in ("x", "?", "\n"))
    script = [(token, letter) for token in (letter, *before)]
    return _write(directory, tokenizer, script, CHATML, n_context)


def write_thoughtful(directory: Path, n_context: int = 16384) -> Path:
    """A checkpoint that thinks one letter and says another."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    said = map(tokenizer.token_to_id, ("<think>", "a", "</think>", "b", EOS))
    return _write(directory, tokenizer, list(pairwise(said)), THINKING_CHATML, n_context)


def _write(
    directory: Path, tokenizer: Tokenizer, script: Pairs, template: str, n_context: int
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config = make_config(tokenizer, n_context)
    weights = lead(make_weights(config), script)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {**tokenizer_config(n_context), "chat_template": template}
    for name, value in (("config", config), ("tokenizer_config", described)):
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def _script(tokenizer: Tokenizer, steps: Sequence[str], answers: Sequence[str]) -> Pairs:
    """Pairs of a token and the one after it."""
    eos = tokenizer.token_to_id(EOS)
    spoken = [tokenizer.token_to_id(answer) for answer in answers]
    firsts = spoken + [eos] * (len(steps) - len(spoken))
    begins = [(tokenizer.token_to_id(s), a) for s, a in zip(steps, firsts, strict=True)]
    return begins + [(answer, eos) for answer in dict.fromkeys(spoken)]


def lead(weights: dict[str, mx.array], script: Pairs) -> dict[str, mx.array]:
    """Weights by which the last token alone decides the next one, as these pairs say.

    Attention runs but contributes nothing.
    """
    for name, array in list(weights.items()):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(array)
        elif array.ndim == 1:
            weights[name] = mx.ones_like(array)
    embedded = weights["model.embed_tokens.weight"]
    head = mx.zeros_like(embedded)
    own = mx.eye(embedded.shape[1])  # orthogonal directions, so that tokens are not confused
    for index, (token, following) in enumerate(script):
        embedded[token] = own[index]
        head[following] += CERTAINTY * own[index]
    weights["lm_head.weight"] = head
    mx.eval(weights)
    return weights
