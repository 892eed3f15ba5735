"""Logprobs in OpenAI's forms, with the text and bytes of each token."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from keepwarm.server.http.body import Fields
from keepwarm.text.detokenize import decode
from keepwarm.text.request import TokenInfo

LOWEST = -9999.0  # minus infinity, which JSON does not have
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Piece(NamedTuple):
    text: str
    data: bytes


class Pieces:
    """Text and bytes of one model's tokens, each computed once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, Piece] = {}
        self._ends = frozenset(tokenizer.eos_token_ids)

    def of(self, token: int) -> Piece:
        if token not in self._known:
            data = self._bytes(token)
            self._known[token] = Piece(data.decode(errors="replace"), data)
        return self._known[token]

    def shown(self, tokens: Sequence[TokenInfo]) -> list[TokenInfo]:
        """All but end-of-sequence tokens, which are not part of the answer."""
        return [info for info in tokens if info.token not in self._ends]

    def _bytes(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        text = decode(self._tokenizer, [token])
        if _REPLACEMENT in text and set(name) <= _BYTE_LEVEL.keys():
            return bytes(_BYTE_LEVEL[character] for character in name)
        if name.startswith("▁") and not text.startswith(" "):
            text = f" {text}"  # decoders drop it at the start of a text
        return text.encode()


def chat_logprobs(pieces: Pieces, tokens: Sequence[TokenInfo]) -> list[Fields]:
    return [
        {
            **_logprob(pieces, info.token, info.logprob),
            "top_logprobs": [_logprob(pieces, top.token, top.logprob) for top in info.top],
        }
        for info in pieces.shown(tokens)
    ]


def text_logprobs(pieces: Pieces, tokens: Sequence[TokenInfo], offset: int = 0) -> Fields:
    """In the format of text completions; `offset` is where these tokens begin in the text."""
    return _text_logprobs(pieces, pieces.shown(tokens), offset)


def prompt_logprobs(pieces: Pieces, tokens: Sequence[TokenInfo], text: str) -> Fields:
    """Of all tokens of a prompt; one that is not in the text, as at its beginning, has no width."""
    n_letters = sum(len(pieces.of(info.token).text) for info in tokens)
    found = _text_logprobs(pieces, tokens, len(text) - n_letters)
    return {**found, "text_offset": [max(0, offset) for offset in found["text_offset"]]}


def joined_logprobs(first: Fields, second: Fields) -> Fields:
    return {key: [*first[key], *second[key]] for key in first}


def _text_logprobs(pieces: Pieces, shown: Sequence[TokenInfo], offset: int) -> Fields:
    names = [pieces.of(info.token).text for info in shown]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    tops = [_tops(pieces, info) for info in shown]
    return {
        "tokens": names,
        "token_logprobs": [
            None if info.logprob is None else finite(info.logprob) for info in shown
        ],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _tops(pieces: Pieces, info: TokenInfo) -> dict[str, float] | None:
    """The likeliest tokens and, as at OpenAI, the one that was taken.

    None for the first token of a prompt, before which there is nothing.
    """
    if info.logprob is None:
        return None
    tops: dict[str, float] = {}
    for top in info.top:  # of two with one text, as parts of characters, the likelier counts
        tops.setdefault(pieces.of(top.token).text, finite(top.logprob))
    tops.setdefault(pieces.of(info.token).text, finite(info.logprob))
    return tops


def finite(logprob: float | None) -> float:
    return LOWEST if logprob is None or not math.isfinite(logprob) else logprob


def _logprob(pieces: Pieces, token: int, logprob: float | None) -> Fields:
    piece = pieces.of(token)
    return {"token": piece.text, "logprob": finite(logprob), "bytes": list(piece.data)}


def _byte_level() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes unchanged, others from U+0100 up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in plain]
    names = [chr(byte) for byte in plain] + [chr(0x100 + index) for index in range(len(moved))]
    return dict(zip(names, plain + moved, strict=True))


_BYTE_LEVEL = _byte_level()
