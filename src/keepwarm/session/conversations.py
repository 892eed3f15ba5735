"""The state of each conversation with each model: turns, tokens, tokens saved by the cache.

Keys and values are not kept here; they are found by their tokens, in live caches and blocks.
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

    n_tokens: int  # of the latest prompt and its answer
    n_turns: int
    tokens_saved: int = 0  # prompt tokens reused, over all turns
    used: float = 0.0  # last update, in seconds since the epoch


class Conversations:
    """An LRU map of conversation states. Thread-safe."""

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
        """Set the state of a conversation with a model."""
        state = replace(state, used=self._clock())
        with self._lock:
            self._states[conversation, model] = state
            self._states.move_to_end((conversation, model))
            while len(self._states) > self._max_states:
                self._states.popitem(last=False)
        return state

    def invalidate(self, conversation: str) -> int:
        """Delete one conversation's states with all models; returns how many there were."""
        with self._lock:
            keys = [key for key in self._states if key[0] == conversation]
            for key in keys:
                del self._states[key]
            return len(keys)
