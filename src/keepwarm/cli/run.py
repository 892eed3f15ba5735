"""`keepwarm run`: answer one prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from keepwarm import config
from keepwarm.cli.options import (
    AgentId,
    KVBits,
    MaxTokens,
    ModelName,
    NoCache,
    Seed,
    SystemFile,
    Temperature,
    check_prompt,
    make_request,
    open_engine,
    print_events,
    system_messages,
)
from keepwarm.errors import BadInput

if TYPE_CHECKING:
    from keepwarm.engine.answer import Answer
    from keepwarm.text.request import Result


def run(
    prompt: Annotated[str, typer.Argument(help="Prompt text; - reads standard input.")],
    *,
    model: ModelName = None,
    system: SystemFile = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    kv_bits: KVBits = None,
    no_cache: NoCache = False,
    agent: AgentId = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")
    ] = False,
    continues: Annotated[
        bool, typer.Option("--continue", help="Continue the agent's conversation with the prompt.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, finish_reason, usage.")
    ] = False,
) -> None:
    """Answer one prompt and exit."""
    text = check_prompt(_standard_input() if prompt == "-" else prompt)
    messages = [*system_messages(system), {"role": "user", "content": text}]
    if raw and system is not None:
        raise BadInput("--raw and --system cannot be combined: raw text has no system prompt.")
    if continues and agent is None:
        raise BadInput("--continue needs --agent.")
    settings = config.load(
        model=model, max_tokens=max_tokens, temperature=temperature, kv_bits=kv_bits
    )
    request = make_request(settings, seed, no_cache, agent)
    asked = {"prompt": text} if raw else {"messages": messages}
    request = replace(request, **asked, continues=continues)
    with open_engine(settings, request) as engine:
        answer = engine.submit(request)
        if as_json:
            print(_as_json(answer.result()))
        else:
            _stream(answer)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput("Standard input is not UTF-8 text; convert it.") from error


def _stream(answer: Answer) -> None:
    for _ in print_events(answer):
        continue
    print()


def _as_json(result: Result) -> str:
    (choice,), usage, receipt = result.choices, result.usage, result.receipt
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "prefilled_tokens": receipt.recomputed,
        "ttft_ms": usage.ttft_ms,
        "tokens_per_second": usage.tokens_per_second,
        "exact": receipt.exact,
        "inexact": list(receipt.inexact),
    }
    if receipt.continued is not None:
        counts["continued"] = receipt.continued
    return json.dumps({"text": choice.text, "finish_reason": choice.reason, "usage": counts})
