"""A model's chat template: what it does with messages, probed once, at load.

Templates differ in what they refuse, move and drop. `Template.conform` rewrites messages so that
the model sees every one of them where the client put it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

from jinja2 import TemplateError

from keepwarm.errors import BadInput, BadModelFile
from keepwarm.prefix.blocks import common_prefix
from keepwarm.text.request import Message, Tool

SYSTEM_LABEL = "System message:\n"  # before a system text inside a user message
BETWEEN = "\n\n"  # between texts joined into one message
MAX_DEPTH = 100  # levels of the arguments of a call, as of a body
MAX_STEPS = 3_000_000  # of a template that is probed: one of 50 KB takes a million
TEMPLATE_CODE = "<template>"  # Jinja's name for the file of one that came as text

# What a template may raise on messages and options it does not support.
REFUSALS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError),
    *(ArithmeticError, AssertionError),  # a division by an option, a `range` that is too long
)

_TOOL = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_FIRST = {"role": "system", "content": "Firstprobe"}
_SYSTEM = {"role": "system", "content": "Sysprobe"}
_ASK = {"role": "user", "content": "Askprobe"}
_ANSWER = {"role": "assistant", "content": "Answerprobe"}
_NEXT = {"role": "user", "content": "Nextprobe"}


@dataclass(frozen=True)
class Template:
    """What a template does; the defaults describe a model without a template."""

    exists: bool = False
    renders_tools: bool = False
    takes_system: bool = False  # one system message, first
    takes_more_systems: bool = False  # several, first
    takes_late_system: bool = False  # after an answer, without moving it
    takes_system_between: bool = False  # between two user messages, without moving it
    takes_system_behind_tools: bool = False  # the second, also between users, behind all tools
    takes_user_twice: bool = True  # two user messages in a row
    arguments_as_text: bool = False  # of tool calls: JSON in a string, not an object
    only_objects: bool = False  # as arguments: it refuses messages with any others
    call_content: str | None = ""  # the content of a message that only calls tools
    before_call: str = ""  # blank text between the content of a message and its first call
    after_answer_text: str = ""  # after every answer, the last one included

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        """Probe a tokenizer's template by rendering small conversations with it."""
        if not tokenizer.has_chat_template:
            return cls(after_answer_text=BETWEEN)
        with _limited_steps():
            return cls._probed(_Probe(tokenizer))

    @classmethod
    def _probed(cls, probe: _Probe) -> Template:
        calls = probe.calls()
        return cls(
            exists=True,
            renders_tools="probetool" in probe.text([_ASK], [_TOOL]),
            takes_system=probe.keeps([_SYSTEM, _ASK]),
            takes_more_systems=probe.keeps([_FIRST, _SYSTEM, _ASK]),
            takes_late_system=probe.keeps([_ASK, _ANSWER, _SYSTEM, _NEXT]),
            takes_system_between=probe.keeps([_FIRST, _ASK, _SYSTEM, _NEXT]),
            takes_system_behind_tools=probe.puts_behind_tools([_FIRST, _SYSTEM, _ASK])
            and probe.puts_behind_tools([_FIRST, _ASK, _SYSTEM, _NEXT]),
            takes_user_twice=probe.keeps([_ASK, _NEXT]),
            arguments_as_text=calls.arguments_as_text,
            only_objects=calls.only_objects,
            call_content=calls.content,
            before_call=calls.before,
            after_answer_text=probe.after_answer(),
        )

    def conform(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """Normalised messages rewritten so that this template shows them all, in their order.

        A system message that the template refuses, drops or moves becomes a user message with a
        label; further ones at the beginning join the first; consecutive user messages are joined
        where the template wants roles to alternate.
        """
        kept: list[dict[str, Any]] = []
        for message in map(self._with_calls, messages):
            self._add(kept, message)
        return kept

    def _add(self, kept: list[dict[str, Any]], message: dict[str, Any]) -> None:
        last = kept[-1]["role"] if kept else None
        if last == message["role"] == "system" and not self.takes_more_systems:
            kept[-1] = _joined(kept[-1], message)
            return
        if message["role"] == "system" and not self._takes_system_after(kept):
            message = {"role": "user", "content": SYSTEM_LABEL + message["content"]}
        if last == message["role"] == "user" and not self.takes_user_twice:
            kept[-1] = _joined(kept[-1], message)
        else:
            kept.append(message)

    def _takes_system_after(self, before: Sequence[Message]) -> bool:
        if not self.exists or self.takes_late_system:
            return True
        return self.takes_system and all(message["role"] == "system" for message in before)

    def _with_calls(self, message: Message) -> dict[str, Any]:
        if not (calls := message.get("tool_calls")):
            return dict(message)
        content = message["content"] or self.call_content
        return {**message, "content": content, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function", {}))
        if "arguments" in function:
            value = parse_arguments(function["arguments"])
            if self.only_objects and not isinstance(value, Mapping):
                value = {"arguments": value} if value else {}
            function["arguments"] = _as_text(value) if self.arguments_as_text else value
        return {**call, "function": function}


def write(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """The conversation as the model's chat template writes it.

    Without a template the contents are joined by blank lines.
    """
    if not tokenizer.has_chat_template:
        return BETWEEN.join(text_of(message) for message in messages)
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **options,
        )
    except REFUSALS as error:
        raise BadInput(f"The model's chat template refuses these messages: {error}.") from error
    return text


def normalise(message: Message) -> dict[str, Any]:
    """A message of OpenAI's shape with the keys and roles that templates know."""
    known = {key: value for key, value in message.items() if value not in (None, [])}
    if not isinstance(known.get("role"), str):
        raise BadInput("A message has no role; set it to system, user, assistant or tool.")
    if known["role"] == "developer":
        known["role"] = "system"
    if "reasoning" in known:
        known.setdefault("reasoning_content", known["reasoning"])
    return {**known, "content": text_of(message)}


def text_of(message: Message) -> str:
    """The content of a message as text, its parts joined by line breaks."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise BadInput("The content of a message is neither text nor a list of parts; send text.")
    return "\n".join(_part_text(part) for part in content)


def opens_thinking(tokenizer: Any, generation_prompt: str) -> bool:
    """Whether an answer after this prompt begins inside its reasoning."""
    start, end = tokenizer.think_start, tokenizer.think_end
    return bool(start) and generation_prompt.rfind(start) > generation_prompt.rfind(end)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise BadInput(
            f"A message contains a part of type {kind!r}, but the model reads text only; omit it."
        )
    return text


def _joined(first: Message, second: Message) -> dict[str, Any]:
    return {**first, "content": first["content"] + BETWEEN + second["content"]}


def parse_arguments(arguments: Any) -> Any:
    """Clients send JSON text, templates want the object. Text that is not JSON stays text, and so
    does what nests too deep for templates.
    """
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False).encode()  # lone surrogates stay text
    except (TypeError, ValueError, RecursionError):
        return arguments
    return arguments if is_deep(value) else value


def is_deep(value: Any) -> bool:
    """Whether it has more than `MAX_DEPTH` levels.

    Level by level: how deep Python itself goes depends on its version.
    """
    level: list[Iterable[Any]] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        nested = (each for outer in level for each in outer if isinstance(each, dict | list))
        level = [each.values() if isinstance(each, dict) else each for each in nested]
        if not level:
            return False
    return True


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@contextmanager
def _limited_steps() -> Iterator[None]:
    """Inside, a template that does not come to an end raises: anyone may have written it.

    Counted are calls, and lines of templates, of this thread.
    """
    left, before = MAX_STEPS, sys.gettrace()

    def count(frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Endless
        return count if frame.f_code.co_filename == TEMPLATE_CODE else None

    sys.settrace(count)
    try:
        yield
    except _Endless as error:
        raise BadModelFile(
            "The model's chat template does not come to an end on a short conversation; use "
            "another model."
        ) from error
    finally:
        sys.settrace(before)


class _Endless(Exception):
    """A template has taken too many steps."""


class _CallStyle(NamedTuple):
    arguments_as_text: bool
    only_objects: bool
    content: str | None
    before: str


class _Probe:
    """Renders small conversations with one template; a refusal gives an empty text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        try:
            return write(self._tokenizer, messages, tools, add_generation_prompt=False)
        except BadInput:
            return ""

    def keeps(self, messages: Sequence[Message]) -> bool:
        """Whether every message is written, in this order."""
        return _in_order(self.text(messages), [message["content"] for message in messages])

    def puts_behind_tools(self, messages: Sequence[Message]) -> bool:
        """Whether it keeps the messages when there are tools, and writes these before `_SYSTEM`."""
        text = self.text(messages, [_TOOL])
        texts = [message["content"] for message in messages]
        return _in_order(text, texts) and _in_order(text, ["probetool", _SYSTEM["content"]])

    def after_answer(self) -> str:
        """What follows every answer, whether or not it is the last message."""
        last, past = (
            text.partition(_ANSWER["content"])[2]
            for text in (self.text([_ASK, _ANSWER]), self.text([_ASK, _ANSWER, _NEXT]))
        )
        return past[: self._n_common(last, past)]

    def _n_common(self, a: str, b: str) -> int:
        """The length of the common prefix, without a partial special token at its end."""
        common = common_prefix(a, b)
        names = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        inside = (
            start
            for start in range(common)
            if any(b.startswith(name, start) and start + len(name) > common for name in names)
        )
        return next(inside, common)

    def calls(self) -> _CallStyle:
        """The first style in which calls are rendered, and not as a Python dict."""
        for content in ("", None):
            for arguments in ({"probekey": "x"}, '{"probekey": "x"}'):
                text = self.text([_ASK, _calling(content, arguments)])
                if "probetool" in text and "probekey" in text and "'probekey'" not in text:
                    is_text = isinstance(arguments, str)
                    takes_text = bool(self.text([_ASK, _calling(content, "probetext")]))
                    before = self._before_call(arguments)
                    return _CallStyle(is_text, not takes_text, content, before)
        return _CallStyle(False, False, "", "")

    def _before_call(self, arguments: Any) -> str:
        """What is blank between the content of a message and its first call."""
        text = self.text([_ASK, _calling(_ANSWER["content"], arguments)])
        start = re.escape(self._tokenizer.tool_call_start or "")
        found = re.search(_ANSWER["content"] + rf"(\s+){start}", text)
        return found[1] if found else ""


def _in_order(text: str, parts: Sequence[str]) -> bool:
    starts = [text.find(part) for part in parts]
    return -1 not in starts and all(a < b for a, b in pairwise(starts))


def _calling(content: str | None, arguments: Any) -> Message:
    function = {"name": "probetool", "arguments": arguments}
    call = {"type": "function", "id": "probe0001", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
