"""The latest answer of each agent, recognised where a client sends it back as other text.

A client that compacts a conversation asks for a summary, and begins anew with that summary in a
message of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

from keepwarm.text.request import Message, Request
from keepwarm.text.template import text_of

MAX_AGENTS = 256
MAX_LINES = 64  # of an answer
MIN_LINE = 24  # characters; shorter lines are in many texts


class LatestAnswers:
    """Thread-safe. Texts of one tenant's agents are compared with that tenant's requests only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: OrderedDict[tuple[str, str], list[str]] = OrderedDict()

    def remember(self, request: Request, answer: str) -> None:
        """Keep the lines of an answer; of one without long lines nothing."""
        lines = [line for line in map(str.strip, answer.splitlines()) if len(line) >= MIN_LINE]
        if request.agent is None or not lines:
            return
        with self._lock:
            self._lines[request.tenant, request.agent] = lines[:MAX_LINES]
            self._lines.move_to_end((request.tenant, request.agent))
            if len(self._lines) > MAX_AGENTS:
                self._lines.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._lines.clear()

    def are_quoted(self, request: Request) -> bool:
        """Whether a message that is not the model's holds most of its agent's latest answer."""
        with self._lock:
            lines = self._lines.get((request.tenant, request.agent or ""), [])
        return bool(lines) and any(
            2 * sum(line in text for line in lines) > len(lines) for text in _given(request)
        )


def _given(request: Request) -> Iterator[str]:
    messages: list[Message] = list(request.messages or ())
    return (text_of(message) for message in messages if message.get("role") != "assistant")
