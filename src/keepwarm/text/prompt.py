"""Messages to the exact tokens that the model will read, and the places where it may be cut."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import thread_time
from typing import Any, NamedTuple, TypeAlias

from keepwarm.errors import BadInput
from keepwarm.text.detokenize import decode
from keepwarm.text.past_answers import Continuations, Splicer, Spot, encode
from keepwarm.text.request import Message, Request, Tool
from keepwarm.text.template import Template, opens_thinking, plain, write

# Messages and tools as the template can show them: tools that it cannot show stand in messages.
Offer: TypeAlias = Callable[
    [Sequence[Message], Sequence[Tool]], tuple[Sequence[Message], Sequence[Tool] | None]
]
Parts: TypeAlias = Callable[[int], str]  # the rendering up to and with a message

TOOLS = -1  # stands for a message in `end_of`: the tools alone, before any message
FIRST, LAST, BETWEEN = 4, 8, 16  # messages after which a prompt is cut: all would be too slow
PATIENCE_S = 0.5  # some templates take a second for one long talk; a cut is worth a little
REACH = 8_000  # characters; a cut is worth this much tokenising, to the special token before it
MARGIN = 1_000  # characters; what stands so far behind a text no longer changes its tokens

# Options of the template that are ours to set, or that would change what rendering gives.
RESERVED = frozenset(
    {
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
        *("padding", "truncation", "max_length", "tokenizer_kwargs"),
    }
)


class Anchor(NamedTuple):
    """A place in the text from which on it is tokenised on its own: a special token, mostly."""

    n_before: int  # tokens before it
    start: int  # in the text
    end: int


@dataclass(frozen=True)
class Tokenised:
    """A text and its tokens, those of answers put in as they were generated."""

    text: str
    tokens: list[int]
    anchors: list[Anchor]
    spliced: int = 0  # tokens that come from answers


class Prompt:
    """The tokens of one request, and the cuts: where another may part from it."""

    def __init__(self, tokenizer: Any, whole: Tokenised, n_messages: int, parts: Parts) -> None:
        self._tokenizer = tokenizer
        self._whole = whole
        self._parts = parts
        self._n_messages = n_messages
        self._ends: dict[int, int | None] = {}

    @property
    def text(self) -> str:
        return self._whole.text

    @property
    def tokens(self) -> list[int]:
        return self._whole.tokens

    @property
    def spliced(self) -> int:
        return self._whole.spliced

    @cached_property
    def cuts(self) -> list[int]:
        """Where another prompt may part from this one: after messages, of long talks not all."""
        deadline = thread_time() + PATIENCE_S
        for message in _worth_cutting(self._n_messages):
            self._end(message, REACH)
            if thread_time() > deadline:
                break
        return sorted({end for end in self._ends.values() if end})

    @cached_property
    def generation_prompt(self) -> str:
        """What asks for the answer: all behind the last message."""
        if not self._n_messages:
            return ""
        return decode(self._tokenizer, self.tokens[self._reached(self._n_messages - 1) :])

    @property
    def opens_thinking(self) -> bool:
        """Whether the answer begins inside a block of reasoning."""
        if not self._tokenizer.has_thinking:
            return False  # and nothing has to be rendered again to know
        return opens_thinking(self._tokenizer, self.generation_prompt)

    def end_of(self, message: int) -> int | None:
        """How many tokens lead up to the end of a message; None if the template refuses to say.

        It is the common token prefix of the whole rendering with that up to the message.
        """
        if not TOOLS <= message < self._n_messages:
            raise BadInput(f"There is no message {message}; there are {self._n_messages}.")
        return self._end(message, len(self.text))

    def message_at(self, token: int) -> int | None:
        """The message that a token stands in; None behind the last."""
        messages = range(self._n_messages)
        found = bisect_right(messages, token, key=self._reached)
        return found if found < self._n_messages else None

    def _reached(self, message: int) -> int:
        """The end of a message, or of the last before it whose end is known."""
        ends = (self.end_of(each) for each in range(message, -1, -1))
        return next((end for end in ends if end is not None), 0)

    def _end(self, message: int, reach: int) -> int | None:
        if self._ends.get(message) is None:
            try:
                part = self._parts(message)
            except BadInput:
                self._ends[message] = None
            else:
                self._ends[message] = _cut(self._tokenizer, self._whole, part, reach)
        return self._ends[message]


class Prompter:
    """From requests to tokens, for one model. Any thread may ask."""

    def __init__(
        self,
        tokenizer: Any,
        template: Template | None = None,
        splicer: Splicer | None = None,
        offer: Offer | None = None,
    ) -> None:
        self.template = template or Template.of(tokenizer)
        self._tokenizer = tokenizer
        self._splicer = splicer
        self._offer = offer or self._as_they_are

    def render(self, request: Request, stored: Continuations | None = None) -> Prompt:
        """The tokens of a request; marks are looked up, so that they are among the cuts.

        Answers from before a restart are looked for in what is `stored`.
        """
        if (request.messages is None) == (request.prompt is None):
            raise BadInput("A request has either messages or a prompt; give one of them.")
        if request.messages is None:
            whole = self._raw(request.prompt or "")
            return Prompt(self._tokenizer, whole, 0, lambda _: "")
        rendering = self._rendered(request, request.messages, stored)
        for mark in request.marks:
            rendering.end_of(mark.message)
        return rendering

    def _rendered(
        self, request: Request, messages: Sequence[Message], stored: Continuations | None
    ) -> Prompt:
        if not messages:
            raise BadInput("There are no messages; send at least one.")
        options = _options(request)
        goes_on = bool(options.pop("continue_final_message", False))
        asked = {"continue_final_message": True} if goes_on else {}
        text = self._write(
            messages, request.tools, add_generation_prompt=not goes_on, **options, **asked
        )

        def part(message: int) -> str:
            some = messages[: message + 1] if message != TOOLS else _others(messages)
            return self._write(some, request.tools, add_generation_prompt=False, **options)

        spots: Sequence[Spot] = ()
        if self._splicer is not None and request.policy.reads:
            closed = part(len(messages) - 1) if stored else text
            starts = _answer_starts(text, closed)
            spots = self._splicer.spots(request.tenant, text, starts, stored)
        whole = _tokenised(self._tokenizer, text, spots)
        return Prompt(self._tokenizer, whole, len(messages), part)

    def _write(self, messages: Sequence[Message], tools: Sequence[Tool], **options: Any) -> str:
        shown, tools_shown = self._offer([plain(message) for message in messages], tools)
        conforming = self.template.conform(shown)
        return write(self._tokenizer, conforming, tools_shown, **options)

    def _as_they_are(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Sequence[Message], Sequence[Tool]]:
        if tools and not self.template.renders_tools:
            raise BadInput("The model's chat template shows no tools; ask without tools.")
        return messages, tools

    def _raw(self, prompt: str | Sequence[int]) -> Tokenised:
        if isinstance(prompt, str):
            return Tokenised(prompt, list(self._tokenizer.encode(prompt)), [])
        n_vocabulary = len(self._tokenizer)
        bad = [token for token in prompt if not 0 <= token < n_vocabulary]
        if bad:
            raise BadInput(f"The model has {n_vocabulary:,} tokens and none is {bad[0]}.")
        return Tokenised("", list(prompt), [])


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """How many tokens, or characters, the two begin with in common."""
    if type(a) is not type(b):
        a, b = list(a), list(b)
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] is shared, a[: high + 1] is not
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _options(request: Request) -> dict[str, Any]:
    options = dict(request.template_options)
    if reserved := RESERVED & options.keys():
        raise BadInput(f"The template option {min(reserved)!r} is not yours to set; leave it out.")
    if request.thinking is not None:
        options["enable_thinking"] = request.thinking
    return options


def _others(messages: Sequence[Message]) -> list[Message]:
    """A conversation that shares no text with this one: what both begin with are the tools."""
    roles = ("system", "user") if messages[0].get("role") in ("system", "developer") else ("user",)
    letter = "0" if not str(messages[0].get("content")).startswith("0") else "1"
    return [{"role": role, "content": letter} for role in roles]


def _answer_starts(text: str, closed: str) -> list[int]:
    """Where answers begin: behind the very text that asks for the next one."""
    asks = text[common_prefix(text, closed) :]
    ends = [found.end() for found in re.finditer(re.escape(asks), text)] if asks else []
    return [end for end in ends if end < len(text)]


def _worth_cutting(n_messages: int) -> list[int]:
    """Messages after which a prompt is cut, the likeliest first; each once."""
    last = range(n_messages - 1, n_messages - 1 - LAST, -1)
    between = range(0, n_messages, max(1, n_messages // BETWEEN))
    wanted = dict.fromkeys((*last, *range(FIRST), *between))
    return [message for message in wanted if 0 <= message < n_messages]


def _tokenised(tokenizer: Any, text: str, spots: Sequence[Spot] = ()) -> Tokenised:
    """Answers by their own tokens, and all between two of them tokenised whole."""
    tokens: list[int] = []
    anchors: list[Anchor] = []
    names = _special_names(tokenizer)
    start = 0
    for spot in (*spots, Spot(len(text), len(text), ())):
        between = encode(tokenizer, text[start : spot.start], start)
        anchors.append(Anchor(len(tokens), start, start))
        anchors += _anchors(names, text, start, between, len(tokens))
        tokens += between
        anchors.append(Anchor(len(tokens), spot.start, spot.start))
        tokens += spot.tokens
        start = spot.end
    return Tokenised(text, tokens, anchors, sum(len(spot.tokens) for spot in spots))


def _cut(tokenizer: Any, whole: Tokenised, part: str, reach: int) -> int | None:
    """The common token prefix with a text, tokenised from the last anchor that both have."""
    shared = common_prefix(whole.text, part)
    if shared == len(whole.text):
        return len(whole.tokens)
    nearest = bisect_right(whole.anchors, shared, key=lambda anchor: anchor.end) - 1
    anchor = whole.anchors[nearest]
    if shared - anchor.start > reach:
        return None
    rest = encode(tokenizer, part[anchor.start : shared + MARGIN], anchor.start)
    after = whole.tokens[anchor.n_before : anchor.n_before + len(rest)]
    return anchor.n_before + common_prefix(after, rest)


def _special_names(tokenizer: Any) -> dict[int, str]:
    if not tokenizer.has_chat_template:
        return {}
    names = {token: name for name, token in tokenizer.get_added_vocab().items()}
    names.pop(tokenizer.unk_token_id, None)  # stands for a text that is not its name
    return names


def _anchors(
    names: dict[int, str], text: str, end: int, tokens: Sequence[int], n_before: int
) -> Iterator[Anchor]:
    """The special tokens of a rendering; with them a cut costs one message, not all before it."""
    for index, token in enumerate(tokens):
        if token in names:
            start = text.find(names[token], end)
            if start < 0:
                return
            end = start + len(names[token])
            yield Anchor(n_before + index, start, end)
