"""Random text of a given length in tokens, the same for equal seeds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.requests.client import Message

COMMON = (
    "the of and to in is that it was for on are as with they be at one have this from or had by "
    "word but not what all were we when your can said there use an each which she do how their if "
    "will up other about out many then them these so some her would make like him into time has "
    "look two more write go see number no way could people my than first water been call who oil "
    "its now find long down day did get come made may part over new sound take only little work "
    "know place year live me back give most very after thing our just name good sentence man "
    "think say great where help through much before line right too mean old any same tell boy "
    "follow came"
)
VOCABULARY = COMMON.split()
N_LONG = 1000


class PromptGenerator:
    """Writes prompts and counts their tokens with one model's tokenizer."""

    def __init__(self, model: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer = tokenizer
        self._costs = {word: self.count(f" {word}") for word in VOCABULARY}
        self._cheapest = min(VOCABULARY, key=lambda word: self._costs[word])

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, n_tokens: int, seed: object) -> str:
        """About `n_tokens`; exactly, if some word is one token."""
        words: list[str] = []
        left = n_tokens
        for drawn in self.draw(n_tokens, seed):
            word = drawn if self._costs[drawn] <= left else self._cheapest
            words.append(word)
            left -= self._costs[word] if len(words) > 1 else self.count(word)
            if left <= 0:
                break
        return " ".join(words)

    def long_text(self, n_characters: int, seed: object) -> str:
        """Of long words that are one token, if there are any: most characters for their tokens."""
        draw, words = random.Random(f"{seed}"), [""]  # noqa: S311
        while n_characters > 0:
            words.append(draw.choice(self._long_words))
            n_characters -= len(words[-1]) + 1
        return " ".join(words)

    @cached_property
    def _long_words(self) -> list[str]:
        inside = [token[1:] for token in self._tokenizer.get_vocab() if token[0] in "Ġ▁"]
        words = [word for word in inside if word.isascii() and word.isalpha()]
        return sorted(words, key=lambda word: (len(word), word))[-N_LONG:] or VOCABULARY

    def draw(self, n_words: int, seed: object) -> list[str]:
        draw = random.Random(f"{seed}")  # noqa: S311
        return [draw.choice(VOCABULARY) for _ in range(n_words)]

    def chat(self, n_tokens: int, template_tokens: int, seed: object) -> list[Message]:
        """A system prompt and a question; `n_tokens` includes those that the template adds."""
        n_question = min(16, max(1, (n_tokens - template_tokens) // 4))
        n_system = max(1, n_tokens - template_tokens - n_question)
        return [
            system(self.text(n_system, f"{seed} system")),
            user(self.text(n_question, f"{seed} question")),
        ]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def with_answer(messages: Sequence[Message], answer: str, question: str) -> list[Message]:
    """The conversation with an answer and the next question."""
    return [*messages, assistant(answer), user(question)]
