"""How far each conversation has come with each model, and what its cache has spared it.

The keys and values themselves lie in live caches and blocks, where tokens find them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

MAX_CONVERSATIONS = 1024


@dataclass(frozen=True)
class ConversationState:
    """One conversation with one model, after its latest turn."""

    n_tokens: int  # that are kept of it
    n_turns: int
    tokens_saved: int = 0  # prompt tokens, over all turns, that nobody had to compute
    used: float = 0.0  # seconds since the epoch


class Conversations:
    """Bounded; the least recently used goes first. Any thread may ask."""

    def __init__(
        self, max_states: int = MAX_CONVERSATIONS, clock: Callable[[], float] = time.time
    ) -> None:
        self._max_states = max_states
        self._clock = clock
        self._lock = threading.Lock()
        self._states: OrderedDict[tuple[str, str], ConversationState] = OrderedDict()

    def get(self, conversation: str, model: str) -> ConversationState | None:
        with self._lock:
            return self._states.get((conversation, model))

    def update(self, conversation: str, model: str, state: ConversationState) -> ConversationState:
        """Say where a conversation stands now; what was said of it before is replaced."""
        state = replace(state, used=self._clock())
        with self._lock:
            self._states[conversation, model] = state
            self._states.move_to_end((conversation, model))
            while len(self._states) > self._max_states:
                self._states.popitem(last=False)
        return state

    def invalidate(self, conversation: str) -> int:
        """Forget one conversation, whichever models it spoke to; how many states that were."""
        with self._lock:
            gone = [key for key in self._states if key[0] == conversation]
            for key in gone:
                del self._states[key]
            return len(gone)

    def __len__(self) -> int:
        with self._lock:
            return len(self._states)
