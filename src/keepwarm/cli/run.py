"""`keepwarm run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from keepwarm.cli.options import (
    AgentId,
    KVBits,
    MaxTokens,
    ModelName,
    NoCache,
    Seed,
    SystemFile,
    Temperature,
    checked,
    live_cache,
    opening,
    settings_for,
)
from keepwarm.errors import BadInput

if TYPE_CHECKING:
    from keepwarm.engine.generate import Generation


def run(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")],
    *,
    model: ModelName = None,
    system: SystemFile = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    kv_bits: KVBits = None,
    no_cache: NoCache = False,
    agent: AgentId = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One object: text, finish_reason, usage.")
    ] = False,
) -> None:
    """Answer one prompt and leave."""
    from keepwarm.engine.generate import generate
    from keepwarm.engine.model import load
    from keepwarm.engine.prompt import render

    text = checked(_standard_input() if prompt == "-" else prompt)
    messages = [*opening(system), {"role": "user", "content": text}]
    settings = settings_for(model, max_tokens, temperature, seed)
    loaded = load(settings.model, settings)
    prompt_tokens, cuts = render(loaded.tokenizer, messages)
    with (
        live_cache(loaded, settings, kv_bits, no_cache, agent) as cache,
        closing(
            generate(
                loaded,
                prompt_tokens,
                cache=cache,
                cuts=cuts,
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=seed,
            )
        ) as generation,
    ):
        if as_json:
            print(_as_json(generation))
        else:
            _stream(generation)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput("Standard input is not UTF-8 text; convert it.") from error


def _stream(generation: Generation) -> None:
    for step in generation:
        print(step.text, end="", flush=True)
    print()


def _as_json(generation: Generation) -> str:
    steps = list(generation)
    answer = {
        "text": "".join(step.text for step in steps),
        "finish_reason": steps[-1].finish_reason,
        "usage": generation.usage._asdict(),
    }
    return json.dumps(answer)
