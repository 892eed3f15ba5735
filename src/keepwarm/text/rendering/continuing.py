"""A request that continues a conversation: what is known of the last answer, and the way without.

The known tokens are used as they are where the template allows it. Elsewhere the kept messages are
rendered, as in a request that sends all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from keepwarm.errors import BadInput
from keepwarm.prefix.turn import KeptTurn
from keepwarm.text.rendering.behind import LastAnswer
from keepwarm.text.request import KnownHistory, Message, Request
from keepwarm.text.template import normalise

# What an answer may have been asked with, where that is not known.
THINKING: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})


def with_kept_options(request: Request) -> Request:
    """With the tools and template options of the conversation, unless the request has its own.

    Clients send the same system prompt with every request: it is not repeated.
    """
    turn = request.history.turn if request.history else None
    if turn is None:
        return request
    n_known = _n_known_systems(turn.messages, request.messages or ())
    has_options = request.thinking is not None or request.template_options
    return replace(
        request,
        messages=list(request.messages or ())[n_known:],
        breakpoints=[
            replace(each, message=each.message - n_known if each.message >= 0 else each.message)
            for each in request.breakpoints
            if not 0 <= each.message < n_known
        ],
        tools=request.tools or turn.tools,
        thinking=request.thinking if has_options else turn.thinking,
        template_options=request.template_options if has_options else turn.template_options,
    )


def _n_known_systems(kept: Sequence[Message], new: Sequence[Message]) -> int:
    """How many of the new messages are the system messages that the conversation begins with."""
    pairs = zip(map(normalise, kept), map(normalise, new), strict=False)
    same = takewhile(lambda pair: pair[0] == pair[1] and pair[0]["role"] == "system", pairs)
    return sum(1 for _ in same)


def with_kept_messages(request: Request) -> Request:
    """The same request with all messages of the conversation; raises if they were not kept."""
    assert request.history is not None
    turn = request.history.turn
    if turn is None:
        why = "the model's chat template changes what comes before them"
        raise BadInput(
            f"Agent {request.agent!r} cannot be continued with only the new messages, because "
            f"{why if request.history.tokens else 'its blocks were evicted'} and the earlier "
            "messages were not kept; send the whole conversation."
        )
    n_kept = len(turn.messages)
    return replace(
        request,
        messages=[*turn.messages, *(request.messages or ())],
        history=None,
        breakpoints=[
            replace(each, message=each.message + n_kept) if each.message >= 0 else each
            for each in request.breakpoints
        ],
    )


def last_answer(
    tokenizer: Any, request: Request, options: Mapping[str, Any], new: Sequence[Message]
) -> LastAnswer | None:
    """What is known of the answer before the new messages; None if its tokens do not suffice."""
    history = request.history
    if history is None or not history.tokens:
        return None
    stop = stop_text(tokenizer, history.tokens)
    if history.turn is not None:
        return _kept_answer(history.turn, stop)
    if request.tools or any(message["role"] == "tool" for message in new):
        return None  # which tools were offered is not known
    if tokenizer.has_thinking and not stop:
        return None  # it may have been cut inside its reasoning
    choices: tuple[dict[str, bool], ...] = (
        {},
        {"enable_thinking": False},
        {"enable_thinking": True},
    )
    return LastAnswer(
        [{"tools": (), **options, **choice} for choice in choices],
        has_thought=_has_thought(tokenizer, history),
        stop=stop,
    )


def _kept_answer(turn: KeptTurn, stop: str) -> LastAnswer | None:
    if not turn.verbatim or not turn.messages:
        return None
    said = normalise(turn.messages[-1])
    thoughts = [bool(normalise(each).get("reasoning_content")) for each in turn.messages]
    is_cut_thought = not stop and thoughts[-1] and not said["content"]
    if said["role"] != "assistant" or is_cut_thought:
        return None
    thinking = {} if turn.thinking is None else {"enable_thinking": turn.thinking}
    return LastAnswer(
        [{"tools": turn.tools, **turn.template_options, **thinking}],
        calling=said if said.get("tool_calls") else None,
        has_thought=any(thoughts),
        stop=stop,
    )


def stop_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of the token that ended the last answer; empty if it was cut."""
    if tokens[-1] not in tokenizer.eos_token_ids:
        return ""
    return str(tokenizer.convert_ids_to_tokens(tokens[-1]))


def _has_thought(tokenizer: Any, history: KnownHistory) -> bool:
    end = tuple(tokenizer.think_end_tokens or ()) if tokenizer.has_thinking else ()
    tokens = tuple(history.tokens)
    starts = (at for at, token in enumerate(tokens) if end and token == end[0])
    return any(tokens[at : at + len(end)] == end for at in starts)
