"""Logprobs: the text and bytes of tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from keepwarm.server.openai.shapes import LogprobOut, TextLogprobs, TopLogprobOut
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


def chat_logprobs(pieces: Pieces, tokens: Sequence[TokenInfo]) -> list[LogprobOut]:
    return [
        {
            **_logprob(pieces, info.token, info.logprob),
            "top_logprobs": [_logprob(pieces, top.token, top.logprob) for top in info.top],
        }
        for info in pieces.shown(tokens)
    ]


def text_logprobs(pieces: Pieces, tokens: Sequence[TokenInfo], offset: int = 0) -> TextLogprobs:
    """In the format of text completions; `offset` is where these tokens begin in the text."""
    shown = pieces.shown(tokens)
    names = [pieces.of(info.token).text for info in shown]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    tops = [{pieces.of(top.token).text: finite(top.logprob) for top in i.top} for i in shown]
    return {
        "tokens": names,
        "token_logprobs": [finite(info.logprob) for info in shown],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def finite(logprob: float | None) -> float:
    return LOWEST if logprob is None or not math.isfinite(logprob) else logprob


def _logprob(pieces: Pieces, token: int, logprob: float | None) -> TopLogprobOut:
    piece = pieces.of(token)
    return {"token": piece.text, "logprob": finite(logprob), "bytes": list(piece.data)}


def _byte_level() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes unchanged, others from U+0100 up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in plain]
    names = [chr(byte) for byte in plain] + [chr(0x100 + index) for index in range(len(moved))]
    return dict(zip(names, plain + moved, strict=True))


_BYTE_LEVEL = _byte_level()
