"""Logprobs in OpenAI's forms, with the text and bytes of each token."""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from collections.abc import Sequence

from keepwarm.server.http.body import Fields
from keepwarm.text.detokenize import Pieces
from keepwarm.text.request import TokenInfo

LOWEST = -9999.0  # minus infinity, which JSON does not have


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
    found = _text_logprobs(pieces, tokens, len(text) - pieces.n_letters(tokens))
    return {**found, "text_offset": [max(0, offset) for offset in found["text_offset"]]}


def joined_logprobs(first: Fields, second: Fields) -> Fields:
    return {key: [*first[key], *second[key]] for key in first}


def _text_logprobs(pieces: Pieces, shown: Sequence[TokenInfo], offset: int) -> Fields:
    found = [pieces.of(info.token) for info in shown]
    decoder = getincrementaldecoder("utf-8")("replace")
    offsets = []
    for piece in found:
        offsets.append(offset + bool(decoder.getstate()[0]))  # behind a part of a character
        offset += len(decoder.decode(bytes(piece.numbers)))
    tops = [_tops(pieces, info) for info in shown]
    return {
        "tokens": [piece.text for piece in found],
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
    return {"token": piece.text, "logprob": finite(logprob), "bytes": piece.numbers}
