"""A request that continues a conversation: what is known of it, and the suffix that is rendered.

The known tokens are used as they are where the template allows it, and only the suffix behind the
last answer is rendered. It is the difference of two renderings: of a stand-in conversation, and of
the same with the new messages. It counts only if both begin alike, and if it is the same behind
every stand-in: then it does not depend on what came before. Elsewhere the kept messages are
rendered, as in a request that sends all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from keepwarm.errors import BadInput
from keepwarm.prefix.turn import KeptTurn
from keepwarm.text.request import KnownHistory, Message, Request
from keepwarm.text.template import normalise

_SYSTEM = {"role": "system", "content": "Sysprobe"}
_ASK = {"role": "user", "content": "Askprobe"}
_EARLIER = {"role": "assistant", "content": "Earlierprobe"}
_ANSWER = {"role": "assistant", "content": "Answerprobe"}
_THOUGHT = "Thoughtprobe"
# With and without a system message, with one answer and with two; the last answer follows.
_STAND_INS: tuple[Sequence[Message], ...] = ((_ASK,), (_SYSTEM, _ASK), (_ASK, _EARLIER, _ASK))


def with_kept_options(request: Request) -> Request:
    """With the tools and template options of the conversation, unless the request has its own.

    Clients send the same system prompt with every request: it is not repeated.
    """
    turn = request.history.turn if request.history else None
    if turn is None or request.messages is None:
        return request
    n_known = _n_known_systems(turn.messages, request.messages)
    has_options = request.thinking is not None or request.template_options
    return replace(
        request,
        messages=list(request.messages)[n_known:],
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


def known_text(tokenizer: Any, request: Request) -> Sequence[int]:
    """The tokens that a raw prompt continues, without the one that ended the last answer."""
    history = request.history
    if history is None or not history.tokens:
        if history is None or (history.turn is not None and not history.turn.messages):
            return ()
        raise BadInput(
            f"Agent {request.agent!r} cannot be continued with only the new text, because its "
            "blocks were evicted; send the whole text."
        )
    return history.tokens[:-1] if stop_text(tokenizer, history.tokens) else history.tokens


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
    last = normalise(turn.messages[-1])
    thoughts = [bool(normalise(each).get("reasoning_content")) for each in turn.messages]
    is_cut_thought = not stop and thoughts[-1] and not last["content"]
    if last["role"] != "assistant" or is_cut_thought:
        return None
    thinking = {} if turn.thinking is None else {"enable_thinking": turn.thinking}
    return LastAnswer(
        [{"tools": turn.tools, **turn.template_options, **thinking}],
        calling=last if last.get("tool_calls") else None,
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


@dataclass(frozen=True)
class LastAnswer:
    """What must be known of the answer that new messages are rendered behind."""

    asked_with: Sequence[Mapping[str, Any]]  # options of the template; several if not known
    calling: Message | None = None  # the answer itself if it calls tools
    has_thought: bool = False  # there is reasoning among the known tokens
    stop: str = ""  # the text of the token that ended it; empty if it was cut


@dataclass(frozen=True)
class SuffixRenderer:
    """Renders messages behind an answer."""

    write: Callable[..., str]  # renders messages, with options of the template
    answer: LastAnswer

    def render(self, new: Sequence[Message], **options: Any) -> str | None:
        """The end of the answer, and the new messages.

        None if what came before would change them, or they would change it.
        """
        try:
            found = {self._behind(past, new, options) for past in _STAND_INS}
        except BadInput:  # the template refuses a stand-in, or these messages behind it
            return None
        return found.pop() if len(found) == 1 else None

    def _behind(
        self, past: Sequence[Message], new: Sequence[Message], options: Mapping[str, Any]
    ) -> str | None:
        last = self.answer.calling or _ANSWER
        whole_past = [_with_thought(each, self.answer.has_thought) for each in (*past, last)]
        alone = self.write(whole_past, **{**options, "add_generation_prompt": False})
        known = alone[: self._end(alone)]
        whole = self.write([*whole_past, *new], **options)
        if not known or not whole.startswith(known) or not self._was_asked_for(known, past):
            return None
        return whole[len(known) :]

    def _end(self, alone: str) -> int:
        """Where the text of the answer ends; that of a call ends before its stop token."""
        if self.answer.calling is None:
            return alone.rfind(_ANSWER["content"]) + len(_ANSWER["content"])
        return max(0, alone.rfind(self.answer.stop)) if self.answer.stop else 0

    def _was_asked_for(self, known: str, question: Sequence[Message]) -> bool:
        """Whether a request for an answer, followed by the answer, gives the known text."""
        question = [_with_thought(each, self.answer.has_thought) for each in question]
        asks = (
            self.write(question, **{**options, "add_generation_prompt": True})
            for options in self.answer.asked_with
        )
        return all(known.startswith(ask) and self._is_answer(known[len(ask) :]) for ask in asks)

    def _is_answer(self, text: str) -> bool:
        if self.answer.has_thought:
            return _THOUGHT in text
        return self.answer.calling is not None or text == _ANSWER["content"]


def _with_thought(message: Message, has_thought: bool) -> Message:
    if not has_thought or message["role"] != "assistant":
        return message
    return {**message, "reasoning_content": _THOUGHT}
