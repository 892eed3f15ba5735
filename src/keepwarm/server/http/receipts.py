"""Receipts as JSON: a field of the body and a response header."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import NotRequired

from typing_extensions import TypedDict

from keepwarm.text.request import Inexact, Receipt

RECEIPT_HEADER = "x-keepwarm-receipt"
OPTIONAL = (
    *("inexact", "reordered", "unread", "ignored_fields", "miss"),
    *("repeated_calls", "durable", "shared", "continued", "scored"),
)


class ReceiptMissOut(TypedDict):
    position: int
    message: int | None
    reason: str
    nearest: int


class ReceiptOut(TypedDict):
    """How much of the prompt was reused and how much was computed."""

    prompt_tokens: int
    reused: dict[str, int]
    recomputed: int
    saved_ms: float
    exact: bool
    inexact: NotRequired[list[Inexact]]  # why not
    spliced: int
    scrubbed: list[str]
    reordered: NotRequired[list[str]]  # parts of the prompt that come elsewhere
    unread: NotRequired[list[str]]  # kinds of parts replaced by a note
    ignored_fields: NotRequired[list[str]]  # fields of the request without effect here
    miss: NotRequired[ReceiptMissOut]
    repeated_calls: NotRequired[list[str]]  # ids of calls as the model made them just before
    durable: NotRequired[bool]  # only when a durable request is done
    shared: NotRequired[int]  # prompt tokens that another machine would restore, when it is done
    scored: NotRequired[int]  # prompt tokens with logprobs, for which nothing is reused
    continued: NotRequired[int]  # known tokens of the agent, if only new messages were sent


def receipt_dict(receipt: Receipt) -> ReceiptOut:
    fields = asdict(receipt)
    fields["exact"] = receipt.exact
    fields["inexact"] = list(receipt.inexact) or None
    fields["reused"] = dict(receipt.reused)
    fields["scrubbed"] = list(receipt.scrubbed)
    fields["reordered"] = list(receipt.reordered) or None
    fields["unread"] = list(receipt.unread) or None
    fields["ignored_fields"] = list(receipt.ignored_fields) or None
    fields["saved_ms"] = round(receipt.saved_ms, 3)
    fields["repeated_calls"] = list(receipt.repeated_calls) or None
    for name in OPTIONAL:
        if fields[name] is None:
            del fields[name]
    return fields  # type: ignore[return-value]


def receipt_headers(receipt: Receipt) -> dict[str, str]:
    return {RECEIPT_HEADER: json.dumps(receipt_dict(receipt), separators=(",", ":"))}
