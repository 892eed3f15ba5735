"""What a chat template writes behind the last answer of a conversation that it does not see.

It is the difference of two renderings: of a stand-in conversation, and of the same with the new
messages. It counts only if both begin alike, and if it is the same behind every stand-in: then it
does not depend on what came before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from keepwarm.errors import BadInput
from keepwarm.text.request import Message

_SYSTEM = {"role": "system", "content": "Sysprobe"}
_ASK = {"role": "user", "content": "Askprobe"}
_EARLIER = {"role": "assistant", "content": "Earlierprobe"}
_ANSWER = {"role": "assistant", "content": "Answerprobe"}
_THOUGHT = "Thoughtprobe"

# With and without a system message, with one answer and with two; the last answer follows.
_STAND_INS: tuple[Sequence[Message], ...] = ((_ASK,), (_SYSTEM, _ASK), (_ASK, _EARLIER, _ASK))


class Write(Protocol):
    """Renders messages."""

    def __call__(self, messages: Sequence[Message], /, **options: Any) -> str: ...


@dataclass(frozen=True)
class LastAnswer:
    """What must be known of the answer that new messages are rendered behind."""

    asked_with: Sequence[Mapping[str, Any]]  # options of the template; several if not known
    calling: Message | None = None  # the answer itself if it calls tools
    has_thought: bool = False  # there is reasoning among the known tokens
    stop: str = ""  # the text of the token that ended it; empty if it was cut


@dataclass(frozen=True)
class Behind:
    """Renders messages behind an answer."""

    write: Write
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
        said = self.answer.calling or _ANSWER
        whole_past = [_with_thought(each, self.answer.has_thought) for each in (*past, said)]
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
