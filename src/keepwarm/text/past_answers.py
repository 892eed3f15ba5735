"""Past answers: clients send them back as text; prompts use the tokens that were generated.

Tokenising an answer again may give other tokens than those generated, and every cached token after
the first difference would be lost. So answers are remembered by the prompt they followed, and
spliced in where a new rendering has exactly their text. With an answer goes what its prompt had for
the answers before: which tokens those are is decided once in a conversation, wherever it goes on.
"""

from __future__ import annotations

import secrets
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

from keepwarm.text.detokenize import decode
from keepwarm.text.special_tokens import Encode, unmask
from keepwarm.text.template import Template

MAX_BYTES = 16 << 20
ENTRY_BYTES = 600  # overhead of one answer in Python, without its text and tokens
SPAN_BYTES = 100  # of each that comes before it
MAX_ANSWERS = 16  # per prompt
GUESS = 2_000  # characters of an answer, to choose between several stored ones
MAX_ASKED = 4  # last answers that other machines are asked for
LONGEST_TOKEN = 16  # characters of a single-token guess, at most
CONTEXT = 8  # tokens decoded with an answer: some decoders treat the start of a text differently
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class KnownSpan(NamedTuple):
    """A part of a text whose tokens are known."""

    start: int
    end: int
    tokens: Sequence[int]


# Given tokens and guesses: stored continuations of the tokens, those most like a guess first.
Continuations: TypeAlias = Callable[
    [Sequence[int], Sequence[Sequence[int]]], Iterable[Sequence[int]]
]


class StoredAnswers(NamedTuple):
    """Past answers that this process may not remember."""

    follow: Continuations
    # Given texts of prompts: all answers until then, as machines that have answered them know.
    elsewhere: Callable[[Sequence[str]], Iterable[Sequence[KnownSpan]]] = lambda _: ()
    # Given the text of a prompt, all answers with its own, the tokens of both, and whether that is
    # still wanted: tells others.
    share: Callable[
        [str, Sequence[KnownSpan], Sequence[int], Callable[[], bool]], Future[None] | None
    ] = lambda *_: None


class _Step(NamedTuple):
    """The part of an answer found so far, and whether the answer ends there."""

    span: KnownSpan
    is_whole: bool


class _PackedSpan(NamedTuple):
    start: int
    end: int
    tokens: bytes


class _Answer(NamedTuple):
    text: str
    spans: Sequence[_PackedSpan]  # those of its prompt, then its own; they share their tokens

    @property
    def n_bytes(self) -> int:
        """Without the tokens."""
        return ENTRY_BYTES + 4 * len(self.text) + SPAN_BYTES * len(self.spans)


class _Prompt(NamedTuple):
    """One prompt's length in characters, and its answers by their text."""

    length: int
    answers: OrderedDict[str, _Answer]


class Splicer:
    """An LRU cache of answers. Thread-safe.

    Prompts are stored as digests only; an answer is spliced in only where its text matches.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: Template | None = None,
        max_bytes: int = MAX_BYTES,
        n_vocab: int = 1 << 31,
    ) -> None:
        self._tokenizer = tokenizer
        self._after = (template or Template.of(tokenizer)).after_answer_text
        specials = _specials(tokenizer)
        self._special_ids = frozenset(specials)
        self._special_texts = tuple(specials.values())
        self._max_bytes = max_bytes
        self._n_vocab = n_vocab  # the model's, which may generate ids that the tokenizer has not
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._lengths: Counter[int] = Counter()  # of prompts, in characters
        self._tokens: dict[bytes, bytes] = {}  # packed, by themselves
        self._n_held: Counter[bytes] = Counter()  # answers that hold them
        self.n_bytes = 0

    def remember(
        self,
        tenant: str,
        text: str,
        tokens: Sequence[int],
        generated: Sequence[int],
        before: Sequence[KnownSpan],
    ) -> KnownSpan | None:
        """Keep an answer without its stop token; `text` and `tokens` are its prompt's, `before` the
        answers in that.

        An answer that ends inside a character is not kept: its text is incomplete.
        """
        kept = _without_stop(self._tokenizer, generated)
        answer = decode_after(self._tokenizer, tokens[-CONTEXT:], kept)
        if not answer or answer.endswith(REPLACEMENT):
            return None
        ((_, key),) = self._keys(tenant, text, [len(text)])
        span = KnownSpan(len(text), len(text) + len(answer), kept)
        with self._lock:
            self._put(key, len(text), answer, [*before, span])
            while self.n_bytes > self._max_bytes:
                self._drop(next(iter(self._prompts)))
        return span

    def spans(
        self,
        tenant: str,
        text: str,
        starts: Sequence[int] = (),
        stored: StoredAnswers | None = None,
        to_tokens: Encode | None = None,
    ) -> list[KnownSpan]:
        """The past answers in this text, in order, with the tokens that were generated.

        At `starts`, answers after the last that is remembered are looked up in `stored`.
        `to_tokens` tokenises parts of this text, if they are not tokenised as any text.
        """
        found = self.remembered(tenant, text)
        if stored is None or not _after(found, starts):
            return found
        to_tokens = to_tokens or partial(encode, self._tokenizer)
        found = self._elsewhere(tenant, text, found, starts, stored, to_tokens=to_tokens)
        if not _after(found, starts):
            return found
        return self._with_stored(tenant, text, found, starts, stored, to_tokens=to_tokens)

    def can_end(self, text: str, answer: Sequence[int]) -> bool:
        """Whether this text, tokenised separately, can follow the tokens of an answer."""
        return self._ends(text, 0, answer)

    def remembered(self, tenant: str, text: str) -> list[KnownSpan]:
        """The last past answer in this text that is in memory, after those of its prompt."""
        with self._lock:
            lengths = sorted(length for length in self._lengths if length < len(text))
        for start, key in reversed(list(self._keys(tenant, text, lengths))):
            if found := self._at(key, text, start):
                return found
        return []

    def clear(self) -> None:
        with self._lock:
            self._prompts.clear()
            self._lengths.clear()
            self._tokens.clear()
            self._n_held.clear()
            self.n_bytes = 0

    def __len__(self) -> int:
        with self._lock:
            return sum(len(prompt.answers) for prompt in self._prompts.values())

    def _at(self, key: bytes, text: str, start: int) -> list[KnownSpan]:
        """The longest remembered answer at this position, if any, after those of its prompt."""
        with self._lock:
            prompt = self._prompts.get(key)
            answers = list(prompt.answers.values()) if prompt else []
            if prompt:
                self._prompts.move_to_end(key)
        for answer in sorted(answers, key=lambda answer: -len(answer.text)):
            if not _spells(text, start, answer.text):
                continue
            spans = [KnownSpan(a, b, array("I", packed)) for a, b, packed in answer.spans]
            if self._ends(text, start + len(answer.text), spans[-1].tokens):
                return spans
        return []

    def _elsewhere(
        self,
        tenant: str,
        text: str,
        remembered: list[KnownSpan],
        starts: Sequence[int],
        stored: StoredAnswers,
        *,
        to_tokens: Encode,
    ) -> list[KnownSpan]:
        """What the machine knows that gave the last answer; else what is remembered."""
        newest = sorted(_after(remembered, starts), reverse=True)[:MAX_ASKED]
        for spans in stored.elsewhere([text[:start] for start in newest]):
            prompt = self._context(text, spans, to_tokens)
            if prompt is not None:
                *before, last = spans
                self.remember(tenant, text[: last.start], prompt, last.tokens, before)
                return list(spans)
        return remembered

    def _context(
        self, text: str, spans: Sequence[KnownSpan], to_tokens: Encode
    ) -> Sequence[int] | None:
        """Tokens before the last of these answers, a few; None unless all are in this text."""
        context: Sequence[int] = ()
        after: Sequence[int] = ()
        at = 0
        for start, end, tokens in spans:
            if not at <= start < end <= len(text) or max(tokens, default=0) >= self._n_vocab:
                return None
            context = [*after, *to_tokens(text[at:start], at)][-CONTEXT:]
            answer = decode_after(self._tokenizer, context, tokens) or ""
            is_here = len(answer) == end - start and _spells(text, start, answer)
            if not (is_here and self._ends(text, end, tokens)):
                return None
            after, at = [*context, *tokens][-CONTEXT:], end
        return context

    def _with_stored(
        self,
        tenant: str,
        text: str,
        known: Sequence[KnownSpan],
        starts: Sequence[int],
        stored: StoredAnswers,
        *,
        to_tokens: Encode,
    ) -> list[KnownSpan]:
        """Answer by answer: each lookup needs the tokens of the answers before it."""
        found: list[KnownSpan] = []
        before: list[int] = []
        at = 0
        for span in (*known, *(KnownSpan(n, n, ()) for n in sorted(_after(known, starts)))):
            start, is_known = span.start, bool(span.tokens)
            if start < at:
                continue
            prompt = before + to_tokens(text[at:start], at)
            seen = span if is_known else self._follow(text, start, prompt, stored.follow)
            if seen is None:  # this prompt is not stored, so no longer one is
                return found
            if seen.tokens:
                if not is_known:
                    self.remember(tenant, text[:start], prompt, seen.tokens, found)
                found.append(seen)
                before, at = [*prompt, *seen.tokens], seen.end
        return found

    def _follow(
        self, text: str, start: int, prompt: Sequence[int], stored: Continuations
    ) -> KnownSpan | None:
        """The stored answer at this position, collected block by block.

        Without tokens if only other answers follow this prompt; None if nothing does.
        """
        tokens: list[int] = []
        end = start
        while candidates := list(stored([*prompt, *tokens], self._guesses(text, end))):
            steps = (self._step(text, start, prompt, [*tokens, *more]) for more in candidates)
            step = next((step for step in steps if step is not None), None)
            if step is None:
                return KnownSpan(start, start, ())
            if step.is_whole:
                return step.span
            tokens, end = list(step.span.tokens), step.span.end
        return KnownSpan(start, start, ()) if tokens else None

    def _step(
        self, text: str, start: int, prompt: Sequence[int], tokens: Sequence[int]
    ) -> _Step | None:
        """The answer up to its first special token; None if the text differs."""
        special = next((i for i, t in enumerate(tokens) if t in self._special_ids), None)
        kept = tokens[:special]
        answer = decode_after(self._tokenizer, prompt[-CONTEXT:], kept)
        if not answer or not _spells(text, start, answer):
            return None
        end = start + len(answer)
        is_whole = self._ends(text, end, kept)
        if special is not None and not is_whole:
            return None
        return _Step(KnownSpan(start, end, kept), is_whole)

    def _guesses(self, text: str, start: int) -> list[list[int]]:
        """How an answer may continue here: as tokenised text, or with any single token."""
        starts = [text[start : start + length] for length in range(LONGEST_TOKEN, 0, -1)]
        encoders = (self._encode, self._encode_inside)
        encoded = [to_tokens(some) for some in starts for to_tokens in encoders]
        singles = [tokens for tokens in encoded if len(tokens) == 1]
        return [self._encode_inside(text[start : start + GUESS]), *singles]

    def _encode_inside(self, text: str) -> list[int]:
        """Tokens of text inside another: some tokenizers put a space before the first word."""
        return self._encode(f"\n{text}")[len(self._encode("\n")) :]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _ends(self, text: str, end: int, tokens: Sequence[int]) -> bool:
        """Whether an answer ends here: a special token follows, or the template's own text.

        That text is tokenised separately, so it must decode to the same text after the answer.
        """
        if text.startswith(self._special_texts, end):
            return True
        after = self._after
        if not after or not text.startswith(after, end):
            return False
        return decode_after(self._tokenizer, tokens[-CONTEXT:], self._encode(after)) == after

    def _keys(self, tenant: str, text: str, lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Digests of the text's prefixes of these lengths, in one pass."""
        name = blake2b(tenant.encode("utf-8", "surrogatepass"), key=self._secret).digest()
        digest, start = blake2b(digest_size=20, key=name), 0
        for length in lengths:
            digest.update(text[start:length].encode("utf-8", "surrogatepass"))
            yield length, digest.copy().digest()
            start = length

    def _put(self, key: bytes, length: int, text: str, spans: Sequence[KnownSpan]) -> None:
        if key not in self._prompts:
            self._prompts[key] = _Prompt(length, OrderedDict())
            self._lengths[length] += 1
        answers = self._prompts[key].answers
        self._prompts.move_to_end(key)
        self._forget(answers, text)
        held = [_PackedSpan(a, b, self._hold(array("I", ids).tobytes())) for a, b, ids in spans]
        answers[text] = _Answer(text, held)
        self.n_bytes += answers[text].n_bytes
        if len(answers) > MAX_ANSWERS:
            self._forget(answers, next(iter(answers)))

    def _hold(self, tokens: bytes) -> bytes:
        """The same tokens, once in memory however many answers come after them."""
        self.n_bytes += 0 if tokens in self._tokens else len(tokens)
        self._n_held[tokens] += 1
        return self._tokens.setdefault(tokens, tokens)

    def _drop(self, key: bytes) -> None:
        prompt = self._prompts.pop(key)
        for text in list(prompt.answers):
            self._forget(prompt.answers, text)
        self._lengths[prompt.length] -= 1
        if not self._lengths[prompt.length]:
            del self._lengths[prompt.length]

    def _forget(self, answers: OrderedDict[str, _Answer], text: str) -> None:
        answer = answers.pop(text, None)
        self.n_bytes -= answer.n_bytes if answer else 0
        for span in answer.spans if answer else ():
            self._n_held[span.tokens] -= 1
            if not self._n_held[span.tokens]:
                del self._n_held[span.tokens], self._tokens[span.tokens]
                self.n_bytes -= len(span.tokens)


def n_tokens_of(spans: Sequence[KnownSpan]) -> int:
    return sum(len(span.tokens) for span in spans)


def _after(known: Sequence[KnownSpan], starts: Sequence[int]) -> list[int]:
    """Where answers begin after those that are known."""
    end = known[-1].end if known else 0
    return [start for start in starts if start >= end]


def _spells(text: str, start: int, answer: str) -> bool:
    """Whether an answer is there; special tokens that it spells may be masked."""
    found = text[start : start + len(answer)]
    return answer in (found, unmask(found))


def encode(tokenizer: Any, text: str, start: int = 0) -> list[int]:
    """The tokens of a part of a prompt that begins at character `start`.

    Templates write special tokens themselves; without a template the tokenizer adds them.
    """
    if not text:
        return []
    adds = not tokenizer.has_chat_template and start == 0
    return list(tokenizer.encode(text, add_special_tokens=adds))


def decode_after(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> str | None:
    """The text that tokens add to those before them; None if they change the earlier text."""
    head = decode(tokenizer, before)
    whole = decode(tokenizer, [*before, *tokens])
    return whole[len(head) :] if whole.startswith(head) else None


def _without_stop(tokenizer: Any, generated: Sequence[int]) -> Sequence[int]:
    ends = bool(generated) and generated[-1] in tokenizer.eos_token_ids
    return generated[:-1] if ends else generated


def _specials(tokenizer: Any) -> dict[int, str]:
    """The special tokens, which never merge with text."""
    added = tokenizer.added_tokens_decoder.items()
    return {number: token.content for number, token in added if token.special and token.content}
