"""Messages to the exact tokens that the model will read, and the places where it may be cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jinja2 import TemplateError

from keepwarm.errors import BadInput

Message: TypeAlias = Mapping[str, Any]
Tools: TypeAlias = Sequence[Mapping[str, Any]]


class Prompt(NamedTuple):
    tokens: list[int]
    cuts: list[int]  # lengths in tokens, ascending: where another prompt may part from this one


class Anchor(NamedTuple):
    """A token that stands in the text as it is: what follows it is tokenised on its own."""

    n_before: int  # tokens before it
    start: int  # in the text
    end: int


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
    whole = _text(tokenizer, messages, tools, add_generation_prompt)
    tokens = _encode(tokenizer, whole)
    anchors = [Anchor(0, 0, 0), *_anchors(tokenizer, whole, tokens)]
    cuts = set()
    for end in range(1, len(messages) + 1):
        try:
            part = _text(tokenizer, messages[:end], tools, add_generation_prompt=False)
        except BadInput:
            continue
        shared = len(part) if whole.startswith(part) else common_prefix(whole, part)
        anchor = next(anchor for anchor in reversed(anchors) if anchor.end <= shared)
        rest = _encode(tokenizer, part[anchor.start :])
        cuts.add(anchor.n_before + common_prefix(tokens[anchor.n_before :], rest))
    return Prompt(tokens, sorted(cuts - {0}))


def tokenize(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Tools | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The conversation as tokens, tokenised whole, without its cuts."""
    return _encode(tokenizer, _text(tokenizer, messages, tools, add_generation_prompt))


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """How many tokens, or characters, the two begin with in common."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))


def _text(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Tools | None,
    add_generation_prompt: bool,
) -> str:
    """The conversation as the model's chat template writes it.

    A model without a template reads the contents alone, a blank line between two of them.
    """
    if not tokenizer.has_chat_template:
        return "\n\n".join(message["content"] for message in messages)
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise BadInput(f"The model's chat template refuses these messages: {error}.") from error
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    """A template writes the special tokens itself; without one the tokenizer adds its own."""
    return list(tokenizer.encode(text, add_special_tokens=not tokenizer.has_chat_template))


def _anchors(tokenizer: Any, text: str, tokens: Sequence[int]) -> Iterator[Anchor]:
    """The special tokens of a rendering; with them a cut costs one message, not all before it."""
    if not tokenizer.has_chat_template:
        return
    names = {token: name for name, token in tokenizer.get_added_vocab().items()}
    names.pop(tokenizer.unk_token_id, None)  # stands for a text that is not its name
    end = 0
    for n_before, token in enumerate(tokens):
        if token in names:
            start = text.find(names[token], end)
            if start < 0:
                return
            end = start + len(names[token])
            yield Anchor(n_before, start, end)
