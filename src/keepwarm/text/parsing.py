"""Generated tokens to the parts of an answer: text, reasoning, tool calls; stop strings end it.

Delimiters such as `<think>` and stop strings are matched on the text, however it was tokenised.
Text that may still become one is held back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from keepwarm.text.detokenize import Detokenizer, find_first, held_back
from keepwarm.text.partial_calls import CallPiece, PartialToolCalls
from keepwarm.text.request import Message, ToolCall
from keepwarm.text.template import Template, text_of
from keepwarm.text.tools import (
    CallReader,
    ToolFormat,
    assistant_message,
    is_harmony,
    tool_format,
)

# Segments by mlx-lm's names. Text of any other segment, such as a header, is not shown.
NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"
_STOP = "stop"

_HARMONY = {
    "header": [
        ("<|channel|>analysis<|message|>", REASONING),
        ("<|message|>", NORMAL),
        ("to=functions.", TOOL),
    ],
    REASONING: [("<|end|>", "header")],
    NORMAL: [("<|end|>", "header")],
}


class AnswerText(NamedTuple):
    text: str


class ReasoningText(NamedTuple):
    text: str


Piece: TypeAlias = AnswerText | ReasoningText | CallPiece | ToolCall


class Transition(NamedTuple):
    """A delimiter in the text, and the segment that begins after it."""

    delimiter: str
    segment: str


class Preamble(NamedTuple):
    """What a model writes before its answer: optional reasoning between delimiters, a header."""

    think_start: str = ""
    think_end: str = ""
    header: str = ""


_HARMONY_PREAMBLE = Preamble(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    "<|channel|>final<|message|>",
)
Transitions: TypeAlias = dict[str, list[Transition]]  # by the segment in which they are looked for


@dataclass(frozen=True)
class Markup:
    """The delimiters in a model's answers; determined once per model."""

    tokenizer: Any
    special: Mapping[int, str]  # special tokens: they are not text
    transitions: Mapping[str, Sequence[Transition]]  # without those of tool calls
    first_segment: str  # of an answer to a chat
    tool_format: ToolFormat
    preamble: Preamble

    @classmethod
    def of(cls, tokenizer: Any, template: Template | None = None) -> Markup:
        added = tokenizer.added_tokens_decoder
        special = {index: token.content for index, token in added.items() if token.special}
        harmony = is_harmony(tokenizer)
        first = "header" if harmony else tokenizer.response_initial_state or NORMAL
        transitions = _transitions(tokenizer, harmony)
        preamble = _HARMONY_PREAMBLE if harmony else _preamble(tokenizer, transitions, first)
        calls = tool_format(tokenizer, template or Template.of(tokenizer))
        return cls(tokenizer, special, transitions, first, calls, preamble)

    @property
    def raw(self) -> Markup:
        """The same for the answer to a raw prompt: all of it is text, but calls."""
        return replace(self, transitions={NORMAL: [], REASONING: []})

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning can be told from the rest of an answer."""
        ways = [each for some in self.transitions.values() for each in some]
        return any(each.segment == REASONING for each in ways)


class AnswerReader:
    """Parses one answer, token by token.

    Joined, the texts are what the tokenizer decodes, less special tokens, reasoning and calls.
    Blank text is dropped between calls, and before the first as far as templates write it.
    """

    def __init__(
        self,
        markup: Markup,
        *,
        stop: Sequence[str] = (),
        segment: str = NORMAL,
        calls: CallReader | None = None,
    ) -> None:
        self.stopped: str | None = None  # the stop string that ended the answer
        self.done = False  # the answer is complete; further tokens are ignored
        self.n_reasoning = 0  # tokens
        self._markup = markup
        self._calls = calls
        self._transitions = _with_tools(markup.transitions, calls)
        stops = [Transition(text, _STOP) for text in stop if text]
        self._transitions[NORMAL] = [*stops, *self._transitions[NORMAL]]
        self._text = Detokenizer(markup.tokenizer)
        self._segment = segment
        self._held = ""  # may still become a delimiter
        self._body: list[str] = []  # of the call that is being written
        self._partial: PartialToolCalls | None = None
        self._begun_by = ""  # the delimiter before it
        self._around_call = segment  # the segment that the call interrupts
        self._blank: str | None = "" if calls else None  # all text so far, while it is blank
        self._is_bound = calls is not None and calls.is_bound
        self._called = False
        self._ended = False  # by a stop token

    @property
    def is_answering(self) -> bool:
        """Whether what comes next is text or a call, not reasoning or a header."""
        return self._segment in (NORMAL, TOOL)

    def add(self, token: int) -> list[Piece]:
        """The pieces that this token completes."""
        if self.done:
            return []
        self.n_reasoning += self._segment == REASONING
        if token in self._markup.tokenizer.eos_token_ids:
            self._ended = True
            return []
        return [] if self._is_hidden(token) else list(self._read(self._text.add(token)))

    def finish(self) -> list[Piece]:
        """The pieces still held back. A call that was cut off becomes text, unless bound."""
        pieces: list[Piece] = [] if self.done else list(self._rest())
        if self._blank and not self._called and not self._is_bound:
            pieces.append(AnswerText(self._blank))
        self.done, self._blank = True, None
        return pieces

    def _rest(self) -> Iterator[Piece]:
        yield from self._read(self._text.finish())
        if self._segment == TOOL:
            yield from self._end_call(closed=self._ended)
            self._transitions = _with_tools(self._transitions, None)
            yield from self._read("")
        if not self.done and not (self._is_unsaid() and self._segment == NORMAL):
            yield from self._emit(self._held)

    def _is_unsaid(self) -> bool:
        """Whether what is cut off here can only be part of a call."""
        return self._is_bound and self._blank is not None

    def _is_hidden(self, token: int) -> bool:
        """Special tokens are hidden unless they are part of a delimiter or of a call."""
        name = self._markup.special.get(token)
        if name is None or self._segment == TOOL:
            return False
        every = (each for some in self._transitions.values() for each in some)
        return not any(name in each.delimiter for each in every)

    def _read(self, text: str) -> Iterator[Piece]:
        self._held += text
        while not self.done:
            transitions = self._transitions.get(self._segment, [])
            delimiters = [each.delimiter for each in transitions]
            match = find_first(self._held, delimiters)
            end = match.start if match else len(self._held) - held_back(self._held, delimiters)
            before, self._held = self._held[:end], self._held[end:]
            yield from self._emit(before)
            if match is None:
                return
            self._held = self._held[len(delimiters[match.which]) :]
            yield from self._pass(transitions[match.which])

    def _pass(self, transition: Transition) -> Iterator[Piece]:
        """Continue after a delimiter."""
        if transition.segment == _STOP:
            self.stopped, self.done = transition.delimiter, True
        elif self._segment == TOOL:
            assert self._partial is not None
            if self._partial.is_in_string:  # there it is only quoted
                yield from self._emit(transition.delimiter)
            else:
                yield from self._end_call(transition.delimiter)
        else:
            self._around_call, self._segment = self._segment, transition.segment
            if transition.segment == TOOL and self._calls is not None:
                self._partial, self._begun_by = self._calls.begin(), transition.delimiter

    def _end_call(self, end: str = "", closed: bool = True) -> Iterator[Piece]:
        """Emit the call; if it cannot be parsed, its body is read again as text."""
        assert self._calls is not None
        assert self._partial is not None
        if not end:  # the answer ends here
            held, self._held = self._held, ""
            yield from self._emit(held)
        body, self._body = "".join(self._body), []
        self._segment = self._around_call
        is_whole = closed or not self._calls.format.end
        calls = self._partial.finish(self._calls.read(body)) if is_whole else []
        if calls:
            self._blank, self._called = "", True
            self.done = not self._calls.parallel
            yield from calls
            return
        self._segment = REASONING if self._around_call == REASONING else NORMAL
        if self._is_unsaid() and not closed:
            return
        yield from self._emit(self._begun_by)
        self._held = body + end + self._held

    def _emit(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        if self._segment == TOOL:
            self._body.append(text)
            assert self._partial is not None
            yield from self._partial.add(text)
        elif self._segment == REASONING:
            yield ReasoningText(text)
        elif self._segment == NORMAL:
            yield from self._emit_text(text)

    def _emit_text(self, text: str) -> Iterator[Piece]:
        if self._blank is not None:
            text, self._blank = self._blank + text, None
            if text.isspace():
                self._blank = text
                return
        yield AnswerText(text)


def message_of(answer: Sequence[Piece]) -> dict[str, Any]:
    """An answer as a message."""
    texts = [piece.text for piece in answer if isinstance(piece, AnswerText)]
    thoughts = [piece.text for piece in answer if isinstance(piece, ReasoningText)]
    calls = [piece for piece in answer if isinstance(piece, ToolCall)]
    return assistant_message("".join(texts), "".join(thoughts), calls)


def continued_message(begun: Message, rest: Mapping[str, Any]) -> dict[str, Any]:
    """A message that was begun by the client, with the answer that continues it."""
    return {**begun, **rest, "content": text_of(begun) + rest["content"]}


def _preamble(tokenizer: Any, transitions: Transitions, first: str) -> Preamble:
    """From mlx-lm's delimiters; for an answer that begins with a header, the one before text."""
    if first == NORMAL:
        return Preamble(tokenizer.think_start or "", tokenizer.think_end or "")
    headers = [each.delimiter for each in transitions.get(first, []) if each.segment == NORMAL]
    return Preamble(header=headers[0] if headers else "")


def _transitions(tokenizer: Any, harmony: bool) -> Transitions:
    found: Transitions = {NORMAL: [], REASONING: []}
    if tokenizer.has_thinking:
        found[NORMAL].append(Transition(tokenizer.think_start, REASONING))
        found[REASONING].append(Transition(tokenizer.think_end, NORMAL))
    found[NORMAL] += [Transition(marker, NORMAL) for marker in tokenizer.structural_markers]
    for segment, pairs in (_HARMONY if harmony else tokenizer.response_transitions).items():
        found.setdefault(segment, []).extend(Transition(*pair) for pair in pairs)
    return found


def _with_tools(known: Mapping[str, Sequence[Transition]], calls: CallReader | None) -> Transitions:
    """If mlx-lm does not say where calls begin, they may begin in text and in reasoning."""
    if calls is None:
        return {s: [each for each in some if each.segment != TOOL] for s, some in known.items()}
    transitions = {segment: list(some) for segment, some in known.items()}
    if not any(each.segment == TOOL for some in transitions.values() for each in some):
        for segment in (NORMAL, REASONING):
            transitions[segment].append(Transition(calls.format.start, TOOL))
        if before := calls.format.before:  # the next prompt writes it itself
            transitions[NORMAL].append(Transition(before + calls.format.start, TOOL))
    if calls.format.end:
        transitions[TOOL] = [Transition(calls.format.end, TOOL)]
    return transitions
