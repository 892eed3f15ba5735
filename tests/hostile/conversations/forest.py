"""Conversations that branch: what is asked next goes on from something said before."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

WORDS = ("the", "fox", "dog", "tree", "question", "answer", "document", "lazy", "quick", "brown")
VOCABULARY = 128
MAX_TOKENS = 900  # of what a new prompt goes on from: the cold run of each takes time
MAX_MESSAGES = 9


class Asked(NamedTuple):
    """A prompt, as tokens or as messages, and how it came about."""

    kind: str
    tokens: tuple[int, ...] = ()
    messages: tuple[dict[str, str], ...] = ()


class Forest:
    """Half of the trees are raw tokens, which part anywhere; half are chats."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._asked: list[Asked] = []
        self._said: list[tuple[int, ...]] = []
        self._chats: list[tuple[dict[str, str], ...]] = []
        self._begins = [self._fresh(150, 300) for _ in range(2)]  # many prompts share one

    def next(self) -> Asked:
        if self._asked and self._chance.random() < 0.15:
            return self._chance.choice(self._asked)._replace(kind="again")
        asked = self._next_chat() if self._chance.random() < 0.5 else self._next_raw()
        self._asked.append(asked)
        return asked

    def heard(self, asked: Asked, answer: Sequence[int], text: str) -> None:
        """What was answered; from here on a conversation may go on, or part."""
        if asked.messages:
            self._chats.append((*asked.messages, {"role": "assistant", "content": text}))
        else:
            self._said.append((*asked.tokens, *answer))

    def _next_raw(self) -> Asked:
        kind = self._chance.choice(("new", "next turn", "next turn", "rewind", "edit"))
        if kind == "new" or not self._said:
            begin = self._chance.choice([*self._begins, ()])
            return Asked("new", (*begin, *self._fresh(20, 300)))
        said = self._chance.choice(self._said)
        if kind == "next turn" and len(said) < MAX_TOKENS:
            return Asked(kind, (*said, *self._fresh(1, 60)))
        at = self._chance.randrange(1, min(len(said), MAX_TOKENS))
        other = (said[at] + 1) % VOCABULARY
        if kind == "edit":
            return Asked(kind, (*said[:at], other, *said[at + 1 :])[:MAX_TOKENS])
        return Asked("rewind", (*said[:at], other, *self._fresh(0, 40)))

    def _next_chat(self) -> Asked:
        kind = self._chance.choice(("new", "next turn", "next turn", "fork", "edit"))
        if kind == "new" or not self._chats:
            system = {"role": "system", "content": " ".join(WORDS * self._chance.randint(1, 6))}
            first = (system,) if self._chance.random() < 0.7 else ()
            return Asked("new chat", messages=(*first, self._question()))
        said = self._chance.choice(self._chats)
        if kind == "next turn" and len(said) < MAX_MESSAGES:
            return Asked("next turn", messages=(*said, self._question()))
        questions = [n for n, message in enumerate(said) if message["role"] == "user"]
        at = self._chance.choice(questions)
        after = said[at + 1 :] if kind == "edit" and said[at + 1 :][-1:] != said[-1:] else ()
        return Asked(kind if after else "fork", messages=(*said[:at], self._question(), *after))

    def _question(self) -> dict[str, str]:
        words = self._chance.choices(WORDS, k=self._chance.randint(1, 25))
        return {"role": "user", "content": " ".join(words)}

    def _fresh(self, fewest: int, most: int) -> tuple[int, ...]:
        n_tokens = self._chance.randint(fewest, most)
        return tuple(self._chance.randrange(VOCABULARY) for _ in range(n_tokens))
