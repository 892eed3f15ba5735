"""Special tokens in chats: the template and the model write them, clients only spell them.

Text of a client that spells a special token is *masked* before it is rendered: its characters
become private-use characters, one for one. The template, the cuts and the past answers see no
token there. `encode` turns the characters back and tokenises the whole as the model's tokenizer
would if only the tokens outside of masked text existed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tokenizers import AddedToken, Tokenizer, models

from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import common_prefix
from keepwarm.text.request import Message, Tool
from keepwarm.text.template import parse_arguments

Encode: TypeAlias = Callable[[str, int], list[int]]  # a part of a prompt, and where it begins

MARKUP = re.compile(r"[<>\[\]{}|\N{FULLWIDTH VERTICAL LINE}]")
TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9]*>")  # as in HTML, which users write
HINT = 5  # characters of a token; a text without the beginning of any is not searched further
OTHER = "\0"  # in the finder's vocabulary: any text that is no added token

PLANE = 0x100000  # the last private-use plane holds a stand-in for each character below it
STAND_IN = re.compile("[\U00100000-\U0010ffff]")
KEPT = re.compile(r"[\s\"\\\x00-\x1f]")  # in masked text, so that filters escape and trim it
PROBE = "A b\n  c, d\t12 é 🦊 "


class Chat(NamedTuple):
    """What a client sends to be rendered."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    options: Mapping[str, Any]


class _Span(NamedTuple):
    start: int
    end: int
    token: int


class SpecialTokens:
    """The tokens of one tokenizer that a client may not write. Thread-safe.

    These are the special tokens, and all other added tokens that the template or an answer writes
    or that are no ordinary text: some tokenizers have added words, tags and runs of spaces.
    """

    def __init__(self, tokenizer: Any, written: Iterable[str | None] = ()) -> None:
        """`written`: texts in which the template and the answers write tokens."""
        self._tokenizer = tokenizer
        self._added: dict[int, AddedToken] = dict(tokenizer.added_tokens_decoder)
        texts = [text for text in written if text]
        self._guarded = {i for i, token in self._added.items() if _is_guarded(token, texts)}
        names = [self._added[i].content for i in self._guarded]
        self._longest = max(map(len, names), default=0)
        self._beginnings = {name[:n] for name in names for n in range(1, len(name))}
        self._first = _any_of(name[:1] for name in names)
        self._finder = _Finder(tokenizer, self._added)
        self._hint = _any_of(names, HINT) if self._finder.is_literal else re.compile("")
        self._speller = _Speller.of(tokenizer, self._added, self._guarded)

    def mask(self, chat: Chat) -> Chat | None:
        """The chat with special tokens that it spells masked; None if it spells none."""
        try:
            return self._mask(chat)
        except RecursionError as error:
            raise BadInput(f"The arguments of a call are too deep: {error}.") from error

    def _mask(self, chat: Chat) -> Chat | None:
        texts = list(_given_texts(chat))
        if not self._hint.search("\n".join(texts)) and not any(map(self._breaks_off, texts)):
            return None
        masked = _map_given(chat, self._masked, self._masked_arguments)
        if list(_given_texts(masked)) == texts:
            return None
        if any(map(STAND_IN.search, _texts([*chat]))):
            raise BadInput(
                "The messages contain a special token and characters of the private-use plane "
                "U+100000; leave out one of them."
            )
        return masked

    def raw(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a raw prompt in which text is only text; ids of special tokens are refused.

        Those that the tokenizer itself puts first may be there.
        """
        if isinstance(prompt, str):
            masked = self.mask(Chat([{"role": "user", "content": prompt}], (), {}))
            if masked is None:
                return list(self._tokenizer.encode(prompt))
            return self._encode(masked.messages[0]["content"], add_special_tokens=True)
        begins = common_prefix(prompt, self._tokenizer.encode(""))
        if found := self._guarded.intersection(prompt[begins:]):
            name = self._added[min(found)].content
            raise BadInput(f"The prompt contains the special token {name!r}; remove it.")
        return list(prompt)

    def encode(self, text: str, start: int) -> list[int]:
        """The tokens of a part of a masked prompt; see `past_answers.encode`."""
        adds = not self._tokenizer.has_chat_template and start == 0
        return self._encode(text, add_special_tokens=adds) if text else []

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert self._speller is not None  # else nothing is masked
        return self._speller.encode(text, self._spans(text), add_special_tokens)

    def _masked(self, text: str) -> str:
        spans = self._spans(text) if self._hint.search(text) else []
        if spans and self._speller is None:
            raise BadInput(
                f"The messages contain the special token {text[spans[0].start : spans[0].end]!r}, "
                "which this model's tokenizer cannot read as text; remove it."
            )
        tail = self._breaks_off(text) if self._speller else None
        pieces, at = [], 0
        for span in [*spans, *([tail] if tail else [])]:
            start, end = max(span.start, at), span.end  # a token may be the beginning of another
            pieces += [text[at:start], _stand_ins(text[start:end])] if start < end else []
            at = end
        return "".join(pieces) + text[at:]

    def _masked_arguments(self, text: str) -> Any:
        """Of a call; an escape in its JSON may spell a part of a token."""
        value = parse_arguments(text)
        masked, as_text = _map(value, self._masked), self._masked(text)
        return as_text if parse_arguments(as_text) == masked else masked

    def _spans(self, text: str) -> list[_Span]:
        return [span for span in self._finder.find(text) if span.token in self._guarded]

    def _breaks_off(self, text: str) -> _Span | None:
        """The end of a text that begins a token: some templates join texts without a space."""
        end = len(text.rstrip())
        first = self._first.search(text, max(0, end - self._longest), end)
        starts = range(first.start(), end) if first else ()
        found = next((start for start in starts if text[start:end] in self._beginnings), None)
        return None if found is None else _Span(found, end, -1)


class _Finder:
    """Finds added tokens in text exactly as the tokenizer does, without tokenising the rest."""

    def __init__(self, tokenizer: Any, added: Mapping[int, AddedToken]) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._finder = Tokenizer(models.WordLevel({OTHER: 0}, unk_token=OTHER))
        tokens = {i: _copy(token) for i, token in added.items() if token.content}
        if backend is not None and backend.normalizer is not None:
            self._finder.normalizer = backend.normalizer
        self._finder.add_tokens(list(tokens.values()))
        self._ids = {self._finder.token_to_id(token.content): i for i, token in tokens.items()}
        self.is_literal = self._finder.normalizer is None or not any(
            token.normalized for token in tokens.values()
        )

    def find(self, text: str) -> list[_Span]:
        found = self._finder.encode(text, add_special_tokens=False)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [_Span(*span, self._ids[number]) for number, span in pairs if number in self._ids]


class _Speller:
    """A copy of a tokenizer in which guarded tokens have names that no text contains."""

    def __init__(
        self, tokenizer: Any, added: Mapping[int, AddedToken], guarded: Iterable[int]
    ) -> None:
        backend = tokenizer.backend_tokenizer
        secret = secrets.token_hex(16)
        self._guarded = frozenset(guarded) - {tokenizer.unk_token_id}
        self._names = {i: f"<{secret}:{i}>" for i in guarded}
        self._cut = f"<{secret}>"  # keeps apart what is on both sides of it
        self._speller = Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(backend, part)) is not None:
                setattr(self._speller, part, value)
        tokens = {i: _copy(t, self._names.get(i)) for i, t in added.items() if t.content}
        self._speller.add_tokens([*tokens.values(), AddedToken(self._cut, normalized=False)])
        self._ids = {self._speller.token_to_id(token.content): i for i, token in tokens.items()}
        self._cut_id = self._speller.token_to_id(self._cut)

    @classmethod
    def of(
        cls, tokenizer: Any, added: Mapping[int, AddedToken], guarded: Iterable[int]
    ) -> _Speller | None:
        """None for a tokenizer that is not of the `tokenizers` library, or does more than it."""
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            return None
        speller = cls(tokenizer, added, guarded)
        same = speller.encode(PROBE, []) == list(tokenizer.encode(PROBE, add_special_tokens=False))
        return speller if same else None

    def encode(
        self, text: str, spans: Sequence[_Span], add_special_tokens: bool = False
    ) -> list[int]:
        """Tokens of a masked text in which these spans are real tokens."""
        pieces, at = [], 0
        for start, end, token in spans:
            pieces += [unmask(text[at:start]), self._names[token]]
            at = end
        return self._encode("".join(pieces) + unmask(text[at:]), add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoded = self._speller.encode(text, add_special_tokens=add_special_tokens)
        while leaks := list(self._leaks(encoded)):
            text = self._cut_apart(text, leaks)
            encoded = self._speller.encode(text, add_special_tokens=add_special_tokens)
        pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        kept = (pair for pair in pairs if pair != (self._cut_id, 0))
        return [number if added else self._ids.get(number, number) for number, added in kept]

    def _leaks(self, encoded: Any) -> Iterator[tuple[int, int]]:
        """Where text has become a special token: Unigram models have them among their words."""
        found = zip(encoded.ids, encoded.special_tokens_mask, encoded.offsets, strict=True)
        for number, added, offsets in found:
            if number in self._guarded and number not in self._ids and not added:
                yield offsets

    def _cut_apart(self, text: str, leaks: Iterable[tuple[int, int]]) -> str:
        pieces, at = [], 0
        for start, end in leaks:
            if end - start < 2:
                raise BadInput(
                    f"The messages contain the special token {text[start:end]!r}; remove it."
                )
            pieces += [text[at : start + 1], self._cut]
            at = start + 1
        return "".join(pieces) + text[at:]


def _is_guarded(token: AddedToken, written: Sequence[str]) -> bool:
    name = token.content
    if not name.strip():
        return False
    if token.special or any(name in text for text in written):
        return True
    return bool(MARKUP.search(name)) and not TAG.fullmatch(name)


def _copy(token: AddedToken, name: str | None = None) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(name or token.content, **{flag: getattr(token, flag) for flag in flags})


def _any_of(names: Iterable[str], length: int | None = None) -> re.Pattern[str]:
    beginnings = sorted({re.escape(name[:length]) for name in names})
    return re.compile("|".join(beginnings) or "(?!)")  # which nothing matches


def _stand_ins(text: str) -> str:
    masked = "".join(map(_stand_in, text))
    if masked == text:
        raise BadInput(f"The messages contain the special token {text!r}; remove it.")
    return masked


def _stand_in(character: str) -> str:
    keep = ord(character) > 0xFFFF or KEPT.match(character)
    return character if keep else chr(PLANE + ord(character))


def unmask(text: str) -> str:
    """The text that the client has sent."""
    return STAND_IN.sub(lambda found: chr(ord(found[0]) - PLANE), text)


def _given_texts(chat: Chat) -> Iterator[str]:
    """Every text that the client has written, also the keys of its JSON."""
    for message in chat.messages:
        yield from _texts({key: message[key] for key in message if not _is_answer(message, key)})
        for function in _called(message):
            yield from _texts(parse_arguments(function.get("arguments")))
    yield from _texts([chat.tools, chat.options])


def _map_given(
    chat: Chat, change: Callable[[str], str], change_arguments: Callable[[str], Any]
) -> Chat:
    messages = [
        {k: v if _is_answer(message, k) else _map(v, change) for k, v in message.items()}
        for message in chat.messages
    ]
    for message, given in zip(messages, chat.messages, strict=True):
        for changed, function in zip(_called(message), _called(given), strict=True):
            if isinstance(arguments := function.get("arguments"), str):
                changed["arguments"] = change_arguments(arguments)
    return Chat(messages, _map(list(chat.tools), change), _map(chat.options, change))


def _is_answer(message: Message, key: str) -> bool:
    """Whether the model has written it, with special tokens of its own; it stays as it is.

    In its reasoning and its calls only the template writes any.
    """
    return message["role"] == "assistant" and key == "content"


def _called(message: Message) -> list[Any]:
    """The functions that a message calls, with their arguments."""
    return [call["function"] for call in message.get("tool_calls", ()) if "function" in call]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts(each)


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map(key, change): _map(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_map(each, change) for each in value]
    return value
