"""Messages to the exact tokens that the model will read, and the places where it may be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jinja2 import TemplateError

from keepwarm.errors import BadInput

Message: TypeAlias = Mapping[str, Any]
Tools: TypeAlias = Sequence[Mapping[str, Any]]


class Prompt(NamedTuple):
    tokens: list[int]
    cuts: list[int]  # lengths in tokens, ascending: where another prompt may part from this one


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Tools | None = None,
    add_generation_prompt: bool = True,
) -> Prompt:
    """The whole conversation as tokens, with a cut after each message.

    A cut is the common token prefix of the whole rendering with the rendering up to that message;
    a template that refuses to render a conversation so short gives none.
    """
    whole = tokenize(tokenizer, messages, tools, add_generation_prompt)
    cuts = set()
    for end in range(1, len(messages) + 1):
        try:
            part = tokenize(tokenizer, messages[:end], tools, add_generation_prompt=False)
        except BadInput:
            continue
        cuts.add(common_prefix(whole, part))
    return Prompt(whole, sorted(cuts - {0}))


def tokenize(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Tools | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The conversation as tokens, rendered by the model's chat template and tokenised whole.

    A model without a template reads the contents alone, a blank line between two of them.
    """
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))
    try:
        tokens = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
        )
    except (TemplateError, ValueError) as error:
        raise BadInput(f"The model's chat template refuses these messages: {error}.") from error
    return list(tokens)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two begin with in common."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
