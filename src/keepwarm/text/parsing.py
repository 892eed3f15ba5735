"""Generated tokens to the pieces of an answer: text, reasoning, tool calls; stop strings end it.

A model marks its segments up in the text. Marks and stop strings are found in the text, whatever
tokens it came in; what could still become one is held back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from keepwarm.text.detokenize import Detokenizer, find_first, held_back
from keepwarm.text.request import ToolCall
from keepwarm.text.tools import CallReader, ToolFormat, is_harmony, tool_format

# The segments of mlx-lm, by its names; text of any other one, as of a header, is not shown.
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


class Text(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


Piece: TypeAlias = Text | Reasoning | ToolCall


class Edge(NamedTuple):
    """A mark in the text, and the segment that begins behind it."""

    mark: str
    segment: str


class Lead(NamedTuple):
    """What a model writes before its answer: thoughts between two marks, if it likes; a header."""

    think: str = ""
    thought: str = ""  # ends what it thinks
    header: str = ""


_HARMONY_LEAD = Lead(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    "<|channel|>final<|message|>",
)
Edges: TypeAlias = dict[str, list[Edge]]  # by the segment in which they are looked for


@dataclass(frozen=True)
class Markup:
    """What a model marks its answers up with; found out once a model."""

    tokenizer: Any
    special: Mapping[int, str]  # tokens that are no text
    edges: Mapping[str, Sequence[Edge]]  # without those of tools
    first: str  # the segment in which an answer to a chat begins
    tools: ToolFormat
    lead: Lead

    @classmethod
    def of(cls, tokenizer: Any) -> Markup:
        added = tokenizer.added_tokens_decoder
        special = {index: token.content for index, token in added.items() if token.special}
        harmony = is_harmony(tokenizer)
        first = "header" if harmony else tokenizer.response_initial_state or NORMAL
        edges = _edges(tokenizer, harmony)
        lead = _HARMONY_LEAD if harmony else _lead(tokenizer, edges, first)
        return cls(tokenizer, special, edges, first, tool_format(tokenizer), lead)

    def opening(self, tail: Sequence[int]) -> str:
        """In which segment an answer begins; `tail` is the prompt behind the last message."""
        if self.tokenizer.has_thinking:
            start = self.tokenizer.rfind_think_start(tail)
            if start > self.tokenizer.rfind_think_end(tail):
                return REASONING
        return self.first


class AnswerReader:
    """The pieces of one answer, token by token.

    Joined, the texts are what the tokenizer decodes, less special tokens, reasoning and calls.
    Blank text that stands alone around calls belongs to them: templates write it themselves.
    """

    def __init__(
        self,
        markup: Markup,
        *,
        stop: Sequence[str] = (),
        opening: str = NORMAL,
        calls: CallReader | None = None,
    ) -> None:
        self.stopped: str | None = None  # the stop string that ended the answer
        self.done = False  # nothing that follows can belong to the answer
        self.n_reasoning = 0  # tokens
        self._markup = markup
        self._calls = calls
        self._edges = _with_tools(markup.edges, calls)
        self._edges[NORMAL] = [*(Edge(text, _STOP) for text in stop if text), *self._edges[NORMAL]]
        self._text = Detokenizer(markup.tokenizer)
        self._segment = opening
        self._held = ""  # may still become a mark
        self._body: list[str] = []  # of the call that is being written
        self._caller = opening  # the segment in which it is written
        self._blank: str | None = "" if calls else None  # all text so far, while it is blank
        self._called = False
        self._ended = False  # by the model itself

    def add(self, token: int) -> list[Piece]:
        """What this token completes."""
        if self.done:
            return []
        self.n_reasoning += self._segment == REASONING
        if token in self._markup.tokenizer.eos_token_ids:
            self._ended = True
            return []
        return [] if self._is_hidden(token) else list(self._read(self._text.add(token)))

    def finish(self) -> list[Piece]:
        """What was still held back. A call that is cut off comes out as text."""
        pieces: list[Piece] = [] if self.done else list(self._rest())
        if self._blank and not self._called:
            pieces.append(Text(self._blank))
        self.done, self._blank = True, None
        return pieces

    def _rest(self) -> Iterator[Piece]:
        yield from self._read(self._text.finish())
        if self._segment == TOOL:
            yield from self._end_call(closed=self._ended)
            self._edges = _with_tools(self._edges, None)
            yield from self._read("")
        if not self.done:
            yield from self._show(self._held)

    def _is_hidden(self, token: int) -> bool:
        """Special tokens have no text, unless they are part of a mark or of a call."""
        name = self._markup.special.get(token)
        if name is None or self._segment == TOOL:
            return False
        return not any(name in edge.mark for edges in self._edges.values() for edge in edges)

    def _read(self, text: str) -> Iterator[Piece]:
        self._held += text
        while not self.done:
            edges = self._edges.get(self._segment, [])
            marks = [edge.mark for edge in edges]
            found = find_first(self._held, marks)
            end = found.start if found else len(self._held) - held_back(self._held, marks)
            before, self._held = self._held[:end], self._held[end:]
            yield from self._show(before)
            if found is None:
                return
            self._held = self._held[len(marks[found.which]) :]
            yield from self._pass(edges[found.which])

    def _pass(self, edge: Edge) -> Iterator[Piece]:
        """Go on behind a mark."""
        if edge.segment == _STOP:
            self.stopped, self.done = edge.mark, True
        elif self._segment == TOOL:
            yield from self._end_call(edge.mark)
        else:
            self._caller, self._segment = self._segment, edge.segment

    def _end_call(self, end: str = "", closed: bool = True) -> Iterator[Piece]:
        """Give the call; what is none was text all along, and is to be read once more as such."""
        assert self._calls is not None
        if not end:  # the answer ends here
            self._body.append(self._held)
            self._held = ""
        body, self._body = "".join(self._body), []
        self._segment = self._caller
        calls = self._calls.read(body) if closed or not self._calls.format.end else []
        if calls:
            self._blank, self._called = "", True
            self.done = not self._calls.parallel
            yield from calls
            return
        self._segment = REASONING if self._caller == REASONING else NORMAL
        yield from self._show(self._calls.format.start)
        self._held = body + end + self._held

    def _show(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        if self._segment == TOOL:
            self._body.append(text)
        elif self._segment == REASONING:
            yield Reasoning(text)
        elif self._segment == NORMAL:
            yield from self._say(text)

    def _say(self, text: str) -> Iterator[Piece]:
        if self._blank is not None:
            text, self._blank = self._blank + text, None
            if text.isspace():
                self._blank = text
                return
        yield Text(text)


def _lead(tokenizer: Any, edges: Edges, first: str) -> Lead:
    """By the marks that mlx-lm knows; where an answer begins with a header, that of the text."""
    if first == NORMAL:
        return Lead(tokenizer.think_start or "", tokenizer.think_end or "")
    headers = [edge.mark for edge in edges.get(first, []) if edge.segment == NORMAL]
    return Lead(header=headers[0] if headers else "")


def _edges(tokenizer: Any, harmony: bool) -> Edges:
    edges: Edges = {NORMAL: [], REASONING: []}
    if tokenizer.has_thinking:
        edges[NORMAL].append(Edge(tokenizer.think_start, REASONING))
        edges[REASONING].append(Edge(tokenizer.think_end, NORMAL))
    edges[NORMAL] += [Edge(mark, NORMAL) for mark in tokenizer.structural_markers]
    for segment, pairs in (_HARMONY if harmony else tokenizer.response_transitions).items():
        edges.setdefault(segment, []).extend(Edge(*pair) for pair in pairs)
    return edges


def _with_tools(known: Mapping[str, Sequence[Edge]], calls: CallReader | None) -> Edges:
    """A model that says where its calls begin is believed; others call in text and reasoning."""
    if calls is None:
        return {s: [e for e in edges if e.segment != TOOL] for s, edges in known.items()}
    edges = {segment: list(edges) for segment, edges in known.items()}
    if not any(edge.segment == TOOL for each in edges.values() for edge in each):
        for segment in (NORMAL, REASONING):
            edges[segment].append(Edge(calls.format.start, TOOL))
    if calls.format.end:
        edges[TOOL] = [Edge(calls.format.end, TOOL)]
    return edges
