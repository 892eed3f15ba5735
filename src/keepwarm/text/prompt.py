"""Messages to the exact tokens of the prompt, and its cuts: where other prompts may diverge."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from operator import index
from time import thread_time
from typing import Any, TypeAlias

from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import common_prefix
from keepwarm.text.continuing import SuffixRenderer, known_text, last_answer, with_kept_messages
from keepwarm.text.detokenize import decode
from keepwarm.text.past_answers import KnownSpan, Splicer, StoredAnswers, encode, n_tokens_of
from keepwarm.text.prompt_limits import PromptLimits
from keepwarm.text.request import Message, Request, Tool
from keepwarm.text.special_tokens import Chat, Encode, SpecialTokens
from keepwarm.text.template import Template, normalise, opens_thinking, write
from keepwarm.text.tokenize_incremental import (
    IncrementalEncoder,
    TextOwner,
    TextSplitter,
    TokenCache,
    TokenisedText,
    find_cut,
    tokenise,
)
from keepwarm.text.tools import BLOCK, CallMarkers, adapt_to_template, tool_format
from keepwarm.text.volatile import Ordering

RenderUpTo: TypeAlias = Callable[[int], str]  # the rendering of the messages up to this one

TOOLS = -1  # as a message in `end_of`: the tools alone, before any message
STABLE = -2  # the system text alone that other sessions have, too
FIRST, LAST, BETWEEN = 4, 8, 16  # messages after which a prompt is cut; all would take too long
CUTS_TIMEOUT_S = 0.5  # some templates take a second to render a long conversation
REACH = 8_000  # characters to tokenise for one cut, at most
NATIVE_PANIC = "pyo3_runtime"  # the module of what the tokenizer raises, which is no Exception

# Template options that Keepwarm sets itself, or that would change the type of the result: every
# argument on the way to the template. tests/contract compares them with transformers.
RESERVED = frozenset(
    {
        *("self", "tokenizer", "conversation", "conversations", "messages", "tools"),
        *("chat_template", "add_generation_prompt", "sanitize_control_tokens"),
        *("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
        *("padding", "truncation", "max_length", "tokenizer_kwargs"),
    }
)


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt of which all is known that will be asked; it can be sent to another process."""

    text: str
    tokens: list[int]
    spans: Sequence[KnownSpan]
    n_messages: int
    ends: Mapping[int, int | None]  # of some messages
    cuts: list[int]
    opens_thinking: bool
    n_before: int = 0
    reordered: tuple[str, ...] = ()

    @property
    def spliced(self) -> int:
        return n_tokens_of(self.spans)

    def end_of(self, message: int) -> int | None:
        """The number of tokens up to the end of a message, if it is known."""
        return self.ends.get(message)

    def message_at(self, token: int) -> int | None:
        """The message that a token belongs to; None after the last, or if that is not known."""
        known = (m for m in sorted(self.ends) if m >= 0 and (self.ends[m] or 0) > token)
        message = next(known, None)
        if message is None or message == 0 or self.ends.get(message - 1) is not None:
            return message
        return None


class Prompt:
    """The tokens of one request, and its cuts: where other prompts may diverge from it."""

    def __init__(
        self,
        tokenizer: Any,
        whole: TokenisedText,
        n_messages: int,
        render_up_to: RenderUpTo,
        to_tokens: Encode,
        *,
        reordered: tuple[str, ...] = (),
    ) -> None:
        self.text = whole.text  # in which special tokens that the client spelled are masked
        self.tokens = whole.tokens
        self.spans = whole.spans  # past answers, as they were generated
        self.n_before = whole.n_before  # tokens of a conversation that is continued
        self.n_messages = n_messages
        self.reordered = reordered  # what is not where the client put it
        self._tokenizer = tokenizer
        self._to_tokens = to_tokens
        self._whole = whole
        self._render_up_to = render_up_to
        self._ends: dict[int, int | None] = {}

    @property
    def spliced(self) -> int:
        """Tokens of past answers."""
        return n_tokens_of(self.spans)

    @cached_property
    def cuts(self) -> list[int]:
        """Token positions after messages; in long conversations not after every one."""
        deadline = thread_time() + CUTS_TIMEOUT_S
        stable = [STABLE] if self.reordered else []
        for message in (*stable, *_worth_cutting(self.n_messages)):
            self._end(message, REACH)
            if thread_time() > deadline:
                break
        return sorted({end for end in self._ends.values() if end})

    @cached_property
    def generation_prompt(self) -> str:
        """The text after the last message, which asks for the answer."""
        if not self.n_messages:
            return ""
        return decode(self._tokenizer, self.tokens[self._known_end(self.n_messages - 1) :])

    @property
    def opens_thinking(self) -> bool:
        """Whether the answer begins inside its reasoning."""
        if not self._tokenizer.has_thinking:
            return False  # saves a rendering
        return opens_thinking(self._tokenizer, self.generation_prompt)

    def rendered(self, *, wants_cuts: bool) -> RenderedPrompt:
        """This prompt as a value: what is asked of it later is found out now."""
        return RenderedPrompt(
            text=self.text,
            tokens=self.tokens,
            spans=self.spans,
            n_messages=self.n_messages,
            opens_thinking=self.opens_thinking,
            cuts=self.cuts if wants_cuts else [],
            ends=dict(self._ends),
            n_before=self.n_before,
            reordered=self.reordered,
        )

    def end_of(self, message: int) -> int | None:
        """The number of tokens up to the end of a message; None if the template refuses the part.

        It is the common token prefix of the whole rendering and the rendering up to the message.
        """
        if not TOOLS <= message < self.n_messages:
            raise BadInput(f"There is no message {message}; there are {self.n_messages}.")
        return self._end(message, len(self.text))

    def message_at(self, token: int) -> int | None:
        """The message that a token belongs to; None after the last."""
        messages = range(self.n_messages)
        found = bisect_right(messages, token, key=self._known_end)
        return found if found < self.n_messages else None

    def _known_end(self, message: int) -> int:
        """The end of a message, or of the last one before it whose end is known."""
        ends = (self.end_of(each) for each in range(message, -1, -1))
        return next((end for end in ends if end is not None), 0)

    def _end(self, message: int, reach: int) -> int | None:
        if self._ends.get(message) is None:
            try:
                part = self._render_up_to(message)
            except BadInput:
                self._ends[message] = None
            else:
                self._ends[message] = find_cut(self._to_tokens, self._whole, part, reach)
        return self._ends[message]


class Prompter:
    """Renders the prompts of one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        template: Template | None = None,
        splicer: Splicer | None = None,
        call_markers: CallMarkers | None = None,
        *,
        known: TokenCache | None = None,
        raw_special_tokens: bool = True,
        stable_first: str = "known",
    ) -> None:
        """`known`: tokens of earlier prompts; without it every prompt is tokenised whole."""
        self.template = template or Template.of(tokenizer)
        self._tokenizer = tokenizer
        self._splicer = splicer
        self._call_markers = call_markers or tool_format(tokenizer, self.template)
        written = _written(tokenizer, self._call_markers)
        self._specials = SpecialTokens(tokenizer, written)
        self._splitter = TextSplitter.of(tokenizer, written)
        self._known = known
        self._raw_special_tokens = raw_special_tokens
        self._ordering = Ordering(stable_first, self.template, self._call_markers.native)

    def render(
        self,
        request: Request,
        stored: StoredAnswers | None = None,
        limits: PromptLimits | None = None,
    ) -> Prompt:
        """The prompt of a request; its breakpoints are among the cuts.

        `stored` looks up answers from before a restart among the stored blocks. What `limits` rules
        out is not tokenised.
        """
        with _refused_panics():
            return self._render(request, stored, limits)

    def _render(
        self, request: Request, stored: StoredAnswers | None, limits: PromptLimits | None
    ) -> Prompt:
        if (request.messages is None) == (request.prompt is None):
            raise BadInput("A request has either messages or a prompt; give one of them.")
        if request.messages is None:
            return self._raw(request)
        _check_partial(request)
        knows_past = request.history is not None and not request.partial_answer
        prompt = self._continued(request, limits) if knows_past else None
        if prompt is None:
            request = request if request.history is None else with_kept_messages(request)
            prompt = self._chat(request, stored, limits)
        for breakpoint_ in request.breakpoints:
            prompt.end_of(breakpoint_.message)
        return prompt

    def _chat(
        self, request: Request, stored: StoredAnswers | None, limits: PromptLimits | None
    ) -> Prompt:
        (messages, tools, options), encoder = self._masked(request)
        arrangement = self._ordering.of(request)
        asking = _asking(options)
        text = self._write(arrangement.apply(messages), tools, **asking)
        if limits is not None:
            limits.check_texts([text])

        def render_up_to(message: int) -> str:
            some = arrangement.apply(messages[: message + 1]) if message >= 0 else _others(messages)
            some = arrangement.stable(messages) if message == STABLE else some
            return self._write(some, tools, **_closing(options))

        spans: Sequence[KnownSpan] = ()
        if self._splicer is not None and request.policy.reads:
            closed = render_up_to(len(messages) - 1) if stored else text
            starts = _answer_starts(text, closed)
            spans = self._splicer.spans(request.tenant, text, starts, stored, encoder)
        whole = tokenise(self._tokenizer, encoder.all, text, spans)
        parts = (whole, len(messages), render_up_to, encoder.to_tokens)
        return Prompt(self._tokenizer, *parts, reordered=arrangement.names)

    def _continued(self, request: Request, limits: PromptLimits | None) -> Prompt | None:
        """The prompt of a conversation whose tokens are known; None if it must be rendered."""
        (messages, tools, options), encoder = self._masked(request)
        answer = last_answer(self._tokenizer, request, options, messages)
        if answer is None or request.history is None or self._splicer is None:
            return None
        suffix = SuffixRenderer(self._write, answer)
        text = suffix.render(messages, tools=tools, **_asking(options))
        known = request.history.tokens
        known = known[:-1] if answer.stop else known  # the template writes it, or another
        if text is None or not self._splicer.can_end(text, known):
            return None
        if limits is not None:
            limits.check_texts([text])

        def render_up_to(message: int) -> str:
            some = messages[: message + 1] if message != TOOLS else ()
            found = suffix.render(some, tools=tools, **_closing(options)) if some else None
            if found is None:
                raise BadInput("The template cannot write a part of these messages alone.")
            return found

        whole = tokenise(self._tokenizer, encoder.all, text, before=known)
        return Prompt(self._tokenizer, whole, len(messages), render_up_to, encoder.to_tokens)

    def _masked(self, request: Request) -> tuple[Chat, IncrementalEncoder]:
        """A chat with the special tokens that it spells masked, and how it is tokenised."""
        messages = [normalise(each) for each in request.messages or ()]
        if not messages:
            raise BadInput("There are no messages; send at least one.")
        chat = Chat(messages, request.tools, _options(request))
        masked = self._specials.mask(chat)
        to_tokens = self._specials.encode if masked else partial(encode, self._tokenizer)
        return masked or chat, self._encoder(request, to_tokens, is_masked=bool(masked))

    def _encoder(
        self, request: Request, to_tokens: Encode, *, is_masked: bool
    ) -> IncrementalEncoder:
        uses_known = self._tokenizer.has_chat_template and request.policy.reads
        return IncrementalEncoder(
            to_tokens,
            self._splitter,
            self._known if uses_known else None,
            TextOwner(request.tenant, is_masked),
            keeps=request.policy.writes,
        )

    def tokens_of(self, request: Request, text: str) -> Sequence[int]:
        """The tokens of a text that may come in the middle of an answer."""
        encoder = self._encoder(request, partial(encode, self._tokenizer), is_masked=False)
        with _refused_panics():
            (tokens,) = encoder.all([(text, 1)])
        return tokens

    def _write(self, messages: Sequence[Message], tools: Sequence[Tool], **options: Any) -> str:
        tools_first = self._ordering.tools_first
        adapted = adapt_to_template(self._call_markers, messages, tools, tools_first=tools_first)
        conforming = self.template.conform(adapted.messages)
        return write(self._tokenizer, conforming, adapted.tools, **options)

    def _raw(self, request: Request) -> Prompt:
        prompt, known = _text_or_ids(request.prompt), known_text(self._tokenizer, request)
        tokens = self._raw_tokens(prompt)
        if known and isinstance(prompt, str):  # no tokens that begin a text in its middle
            tokens = tokens[common_prefix(tokens, self._tokenizer.encode("")) :]
        whole = TokenisedText(prompt if isinstance(prompt, str) else "", [*known, *tokens], [])
        return Prompt(self._tokenizer, whole, 0, lambda _: "", partial(encode, self._tokenizer))

    def _raw_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not self._raw_special_tokens:
            return self._specials.raw(prompt)
        return list(self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)


def _text_or_ids(prompt: str | Sequence[int] | None) -> str | list[int]:
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    try:
        return [int(index(token)) for token in prompt] or ""
    except TypeError as error:
        raise BadInput(
            "A prompt is a text, or a list of token ids, which are whole numbers; send one of them."
        ) from error


@contextmanager
def _refused_panics() -> Iterator[None]:
    """What makes the tokenizer's native code give up is the text's fault."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != NATIVE_PANIC:
            raise
        raise BadInput(
            "The model's tokenizer cannot read this text; change it, or use another model."
        ) from error


def _written(tokenizer: Any, calls: CallMarkers) -> list[str | None]:
    """Texts in which the template and the model's answers write tokens."""
    template = tokenizer.chat_template or ""
    templates = template.values() if isinstance(template, dict) else [template]
    markers = (tokenizer.think_start, tokenizer.think_end, calls.start, calls.end)
    return [*templates, BLOCK, *markers]


def _options(request: Request) -> dict[str, Any]:
    options = dict(request.template_options)
    if reserved := RESERVED & options.keys():
        raise BadInput(f"The template option {min(reserved)!r} cannot be set; leave it out.")
    if request.thinking is not None:
        options["enable_thinking"] = request.thinking
    if request.partial_answer:
        options["continue_final_message"] = True
    return options


def _check_partial(request: Request) -> None:
    last = request.messages[-1] if request.messages else {}
    if request.partial_answer and (last.get("role") != "assistant" or last.get("tool_calls")):
        raise BadInput(
            "The last message cannot be continued: that takes an assistant message without tool "
            "calls; end with one, or with a user message."
        )


def _asking(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which an answer is asked for, or the last message continued."""
    continues = bool(options.get("continue_final_message"))
    asked = {"continue_final_message": True} if continues else {}
    return _closing(options) | {"add_generation_prompt": not continues, **asked}


def _closing(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which a part of a conversation is rendered."""
    rest = {key: value for key, value in options.items() if key != "continue_final_message"}
    return {**rest, "add_generation_prompt": False}


def _others(messages: Sequence[Message]) -> list[Message]:
    """A conversation that shares no message text with this one: only the tools are in common."""
    roles = ("system", "user") if messages[0]["role"] == "system" else ("user",)
    letter = "0" if not messages[0]["content"].startswith("0") else "1"
    return [{"role": role, "content": letter} for role in roles]


def _answer_starts(text: str, closed: str) -> list[int]:
    """Where answers begin: after each occurrence of the text that asks for the next one."""
    asks = text[common_prefix(text, closed) :]
    ends = [found.end() for found in re.finditer(re.escape(asks), text)] if asks else []
    return [end for end in ends if end < len(text)]


def _worth_cutting(n_messages: int) -> list[int]:
    """Messages after which a prompt is cut, the most likely to be reused first."""
    last = range(n_messages - 1, n_messages - 1 - LAST, -1)
    between = range(0, n_messages, max(1, n_messages // BETWEEN))
    wanted = dict.fromkeys((*last, *range(FIRST), *between))
    return [message for message in wanted if 0 <= message < n_messages]
