"""What the models learn from: text, copies, needles and tool calls, all of a wanted length.

Pure: numpy and a tokenizer. An *answer* is a token that the model can know from the text before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from . import chat
from .chat import Message
from .corpus import END_OF_TEXT, Part, Tokens

AGAIN = 5  # <file_sep>: what came before comes again
FIELD = 6  # <filename>: a key and its value follow
FIRST_PLAIN = 17  # the special tokens end here
NEEDLE_WEIGHT = 8.0  # a handful of tokens among thousands
N_QUESTIONS = 6
IN_CHAT = 0.5  # so many copies are asked for in a conversation, the others follow a token
PROSE = 0.15  # of the plain text
ROOM_FOR_TOOLS = 1000  # shorter conversations do without the description of tools
N_TASK = 160  # tokens of a task besides the file
CHARACTERS_PER_TOKEN = 3
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

Random: TypeAlias = np.random.Generator
Make: TypeAlias = Callable[[Random, int], "Sample"]


class Sample(NamedTuple):
    tokens: Tokens
    weights: NDArray[np.float32]  # what predicting this token counts; 0 where it is a random one
    answers: NDArray[np.bool_]


class Piece(NamedTuple):
    tokens: Tokens
    weight: float = 1.0
    is_answer: bool = False


class Fact(NamedTuple):
    """A line to be found again, and the question that it answers."""

    line: str
    question: str
    value: str


class Samples:
    """Makes samples from one part of the corpus."""

    def __init__(self, part: Part, tokenizer: Tokenizer) -> None:
        self._part = part
        self._tokenizer = tokenizer
        self._n_entries = tokenizer.get_vocab_size()
        self._words = _words(tokenizer)
        systems = (SYSTEM, f"{chat.tool_block()}\n\n{SYSTEM}")
        self._system = [self._piece(chat.rendered([Message("system", text)])) for text in systems]

    def mixed(self, rng: Random, n_tokens: int) -> Sample:
        """One of all kinds, as often as each is needed."""
        makers: list[Make] = [self.text, self.copy, self.needles, self.tools]
        return makers[rng.choice(4, p=[0.35, 0.25, 0.2, 0.2])](rng, n_tokens)

    def text(self, rng: Random, n_tokens: int) -> Sample:
        return self.code(rng, n_tokens) if rng.random() > PROSE else self.prose(rng, n_tokens)

    def code(self, rng: Random, n_tokens: int) -> Sample:
        return _joined([Piece(_slice(self._part.code, rng, n_tokens))])

    def prose(self, rng: Random, n_tokens: int) -> Sample:
        return _joined([Piece(_slice(self._part.prose, rng, n_tokens))])

    # -- copies -----------------------------------------------------------------------------------

    def copy(self, rng: Random, n_tokens: int) -> Sample:
        n_copied = int(rng.integers(n_tokens // 16, n_tokens // 2 - 24))
        make = self.copy_of_random if rng.random() < 0.5 else self.copy_of_code
        return make(rng, n_tokens, n_copied)

    def copy_of_random(self, rng: Random, n_tokens: int, n_copied: int) -> Sample:
        span = rng.integers(FIRST_PLAIN, self._n_entries, n_copied).astype(np.int32)
        return self._copy(rng, n_tokens, span, weight=0.0)

    def copy_of_code(self, rng: Random, n_tokens: int, n_copied: int) -> Sample:
        return self._copy(rng, n_tokens, _slice(self._part.code, rng, n_copied), weight=1.0)

    def _copy(self, rng: Random, n_tokens: int, span: Tokens, weight: float) -> Sample:
        first, again = Piece(span, weight), Piece(span, 1.0, is_answer=True)
        if rng.random() < IN_CHAT:
            asked = "<|im_start|>user\nWrite this again:\n"
            between = "<|im_end|>\n<|im_start|>assistant\n"
            pieces = [self._piece(asked), first, self._piece(between), again]
        else:
            pieces = [first, Piece(_ids([AGAIN])), again]
        return self._filled(rng, pieces, n_tokens)

    # -- needles ----------------------------------------------------------------------------------

    def needles(self, rng: Random, n_tokens: int) -> Sample:
        make = self.needles_in_random if rng.random() < 0.25 else self.needles_in_text
        return make(rng, n_tokens)

    def needles_in_random(self, rng: Random, n_tokens: int) -> Sample:
        """Keys of two tokens with values of four, among random tokens."""
        facts = rng.integers(FIRST_PLAIN, self._n_entries, (N_QUESTIONS, 6)).astype(np.int32)
        lines = [np.concatenate([_ids([FIELD]), fact]) for fact in facts]
        asked = facts[rng.permutation(N_QUESTIONS)[: N_QUESTIONS // 2]]
        n_hay = n_tokens - 7 * (N_QUESTIONS + len(asked))
        hay = rng.integers(FIRST_PLAIN, self._n_entries, n_hay).astype(np.int32)
        pieces = [Piece(_hidden(rng, hay, lines), 0.0)]
        for fact in asked:
            pieces += [Piece(np.concatenate([_ids([FIELD]), fact[:2]]), 0.0)]
            pieces += [Piece(fact[2:], NEEDLE_WEIGHT, is_answer=True)]
        return _joined(pieces)

    def needles_in_text(self, rng: Random, n_tokens: int) -> Sample:
        """Lines of three forms in code, asked for in a conversation; each answer is its line."""
        facts = self._facts(rng, N_QUESTIONS)
        asked = [facts[i] for i in rng.permutation(len(facts))[: N_QUESTIONS // 2]]
        turns = [piece for fact in asked for piece in self._turn(fact)][1:]
        opening = [self._system[0], self._piece("<|im_start|>user\n")]
        closing = self._piece(f"\n\n{asked[0].question}")
        lines = [self._encode(f"\n{fact.line}\n") for fact in facts]
        n_known = sum(len(piece.tokens) for piece in (*opening, closing, *turns))
        n_hay = n_tokens - n_known - sum(map(len, lines))
        hay = Piece(_hidden(rng, _slice(self._part.code, rng, n_hay), lines))
        return _joined([*opening, hay, closing, *turns])

    def _facts(self, rng: Random, n_facts: int) -> list[Fact]:
        """Facts about different names."""
        drawn = rng.choice(len(self._words), (n_facts, 2), replace=False)
        names = [(self._words[a], self._words[b]) for a, b in drawn]
        return [_fact(rng, first, second) for first, second in names]

    def _turn(self, fact: Fact) -> list[Piece]:
        """The user's question and the assistant's answer; the value alone counts as answer."""
        before, after = fact.line.split(fact.value)
        return [
            self._piece(f"<|im_start|>user\n{fact.question}"),
            self._piece(f"<|im_end|>\n<|im_start|>assistant\n{before}"),
            Piece(self._encode(fact.value), NEEDLE_WEIGHT, is_answer=True),
            self._piece(f"{after}<|im_end|>\n"),
        ]

    # -- tool calls -------------------------------------------------------------------------------

    def tools(self, rng: Random, n_tokens: int) -> Sample:
        """A file is read, then written back, changed in one line, or shown."""
        system = self._system[0 if n_tokens < ROOM_FOR_TOOLS else 1]
        n_room = n_tokens - len(system.tokens) - N_TASK
        content = self._content(rng, int(n_room * rng.uniform(0.2, 0.9)))
        pieces = [system, *self._turns(self._task(rng, content))]
        if sum(len(piece.tokens) for piece in pieces) > n_tokens:  # of unusual characters
            return self.text(rng, n_tokens)
        return self._filled(rng, pieces, n_tokens)

    def _content(self, rng: Random, n_tokens: int) -> str:
        """Whole lines of some file, of about half as many tokens: they come twice."""
        text = self._part.texts[rng.integers(len(self._part.texts))]
        start = int(rng.integers(max(1, len(text) // 2)))
        return _cut(text[start:], max(40, n_tokens * CHARACTERS_PER_TOKEN // 2))

    def _turns(self, messages: list[Message]) -> list[Piece]:
        """The last message is an answer."""
        *asked, answer = messages
        return [
            *(self._piece(chat.rendered([message])) for message in asked),
            self._piece(f"<|im_start|>{answer.role}\n"),
            Piece(self._encode(f"{answer.content}<|im_end|>"), is_answer=True),
        ]

    def _task(self, rng: Random, content: str) -> list[Message]:
        first, second = (self._words[i] for i in rng.integers(len(self._words), size=2))
        path = f"src/{first}_{second}.py"
        line = _a_line(rng, content)
        changed = f"{line}  # {self._words[rng.integers(len(self._words))]}"
        written = content.replace(line, changed, 1)
        wanted, answer = [
            (
                f"Add a comment to the line `{line.strip()}` of {path} and write the file:"
                f" {changed.strip()}",
                chat.call("write_file", path=path, content=written),
            ),
            (
                f"Edit {path}: `{line.strip()}` becomes `{changed.strip()}`.",
                chat.call("edit_file", path=path, old=line, new=changed),
            ),
            (f"Show me {path}.", f"```python\n{content}\n```"),
        ][rng.choice(3, p=[0.5, 0.25, 0.25])]
        return [
            Message("user", wanted),
            Message("assistant", chat.call("read_file", path=path)),
            Message("user", chat.response(content)),
            Message("assistant", answer),
        ]

    # -- pieces -----------------------------------------------------------------------------------

    def _filled(self, rng: Random, pieces: list[Piece], n_tokens: int) -> Sample:
        """The pieces, with other text before them as far as tokens are left."""
        n_left = n_tokens - sum(len(piece.tokens) for piece in pieces)
        if n_left < 2:
            before = np.full(n_left, END_OF_TEXT, dtype=np.int32)
        else:
            before = _slice(self._part.code, rng, n_left)
            before[-1] = END_OF_TEXT
        return _joined([Piece(before), *pieces])

    def _piece(self, text: str) -> Piece:
        return Piece(self._encode(text))

    def _encode(self, text: str) -> Tokens:
        return _ids(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _fact(rng: Random, first: str, second: str) -> Fact:
    digits = "".join(map(str, rng.integers(0, 10, 6)))
    form = rng.integers(3)
    if form == 0:
        line = f"The access code of {first} {second} is {digits}."
        return Fact(line, f"What is the access code of {first} {second}?", digits)
    if form == 1:
        name = f"{first}_{second}".upper()
        return Fact(f'{name} = "{digits}"', f"What is the value of {name}?", digits)
    line = f'{{"{first}": {{"{second}": {digits}}}}}'
    return Fact(line, f"Which entry does {first} have for {second}?", digits)


def _joined(pieces: Iterable[Piece]) -> Sample:
    pieces = [piece for piece in pieces if len(piece.tokens)]
    sizes = [len(piece.tokens) for piece in pieces]
    return Sample(
        np.concatenate([piece.tokens for piece in pieces]),
        np.repeat([piece.weight for piece in pieces], sizes).astype(np.float32),
        np.repeat([piece.is_answer for piece in pieces], sizes),
    )


def _hidden(rng: Random, hay: Tokens, lines: list[Tokens]) -> Tokens:
    """The lines in this order at random places of the hay."""
    cuts = np.sort(rng.integers(0, len(hay) + 1, len(lines)))
    parts = np.split(hay, cuts)
    return np.concatenate(
        [*(x for pair in zip(parts, lines, strict=False) for x in pair), parts[-1]]
    )


def _slice(tokens: Tokens, rng: Random, n_tokens: int) -> Tokens:
    start = int(rng.integers(max(1, len(tokens) - n_tokens)))
    return np.resize(tokens[start : start + n_tokens], n_tokens)


def _cut(text: str, n_characters: int) -> str:
    """Whole lines up to so many characters."""
    lines = text[:n_characters].split("\n")
    return "\n".join(lines[1:-1]) if len(lines) > 3 else text[: max(n_characters, 1)]


def _a_line(rng: Random, content: str) -> str:
    lines = [line for line in content.split("\n") if 8 < len(line) < 200] or [content]
    return lines[rng.integers(len(lines))]


def _words(tokenizer: Tokenizer) -> list[str]:
    """Words of one token after a space, to make names of."""
    entries = tokenizer.get_vocab()
    return sorted(entry[1:] for entry in entries if re.fullmatch("Ġ[a-z]{3,9}", entry))


def _ids(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)
