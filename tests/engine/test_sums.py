"""Usages and receipts of several prompts as one."""

from dataclasses import fields, replace

from keepwarm.engine.answer import sum_receipts, sum_usages
from keepwarm.text.request import Miss, Receipt, Usage

FIRST = Receipt(
    prompt_tokens=10,
    reused={"memory": 4},
    recomputed=6,
    saved_ms=1.1,
    inexact=("imported",),
    spliced=2,
    scrubbed=("total-tokens", "budget"),
    reordered=("git-status",),
    unread=("image",),
    ignored_fields=("user",),
    miss=Miss(4, 0, "new"),
    repeated_calls=("a",),
    durable=True,
    shared=4,
    continued=3,
    scored=7,
    phases_ms={"preparing": 2.0},
    speculation={"steps": 5, "drafted": 4, "accepted": 3},
    lossy_tokens=2,
)
SECOND = Receipt(
    prompt_tokens=20,
    reused={"memory": 1, "disk": 10},
    recomputed=9,
    saved_ms=2.2,
    inexact=("quantised", "imported"),
    spliced=3,
    scrubbed=("budget", "date"),
    reordered=("date", "git-status"),
    unread=("audio", "image"),
    ignored_fields=("store", "user"),
    miss=Miss(11, 1, "diverged"),
    repeated_calls=("b",),
    durable=False,
    shared=5,
)


def test_a_sum_keeps_every_field_of_its_receipts():
    assert sum_receipts([FIRST, SECOND]) == Receipt(
        prompt_tokens=30,
        reused={"memory": 5, "disk": 10},
        recomputed=15,
        saved_ms=3.3,
        inexact=("imported", "quantised"),
        spliced=5,
        scrubbed=("total-tokens", "budget", "date"),
        reordered=("git-status", "date"),
        unread=("image", "audio"),
        ignored_fields=("user", "store"),
        miss=SECOND.miss,
        repeated_calls=("a", "b"),
        durable=False,
        shared=9,
        continued=3,
        scored=7,
        phases_ms={"preparing": 2.0},
        speculation={"steps": 5, "drafted": 4, "accepted": 3},
        lossy_tokens=2,
    )


def test_a_sum_of_one_is_that_one():
    """So a field that is added later and forgotten in the sum is noticed."""
    assert all(getattr(FIRST, field.name) != field.default for field in fields(Receipt))
    assert sum_receipts([FIRST]) == FIRST
    usage = Usage(10, 4, 3, 2, 50.0, 30.0)
    assert sum_usages([usage]) == usage


def test_durable_is_unknown_while_one_is():
    assert sum_receipts([FIRST, replace(SECOND, durable=None)]).durable is None


def test_a_sum_of_usages():
    total = sum_usages([Usage(10, 4, 3, 2, 50.0, 30.0), Usage(20, 11, 5, 1, 20.0, 25.0)])
    assert total == Usage(30, 15, 8, 3, ttft_ms=50.0, tokens_per_second=25.0)
