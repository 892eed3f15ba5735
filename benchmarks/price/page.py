"""The tables of docs/results/price.md from docs/results/price.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.price.codecs import CODECS, Q4, Q4_IN_64, Q8, Codec

LONG = 8192  # tokens of the conversation whose bytes are compared
MAX_NEEDLES_LOST = 0.02


class Goal(NamedTuple):
    """What a codec must hold to be offered, on every model and at every length."""

    max_kl: float
    times_smaller: float


GOALS = {Q8.name: Goal(0.0005, 1.85), **dict.fromkeys((Q4.name, Q4_IN_64.name), Goal(0.004, 3.0))}


def markdown(found: Mapping[str, Any]) -> str:
    """What is offered, the speed, and the tables, model by model."""
    lines = [*_verdicts(found["models"]), *_speeds(found["speed"]), *_stored(found["stored"])]
    for name, parts in found["models"].items():
        lines += _model(name, parts)
    return "\n".join([*lines, ""])


def _verdicts(models: Mapping[str, Any]) -> Iterator[str]:
    head = ["codec", "largest KL", "goal", f"times smaller at {LONG:,} tokens", "goal"]
    rows = [_verdict(codec, models) for codec in CODECS if codec.name in GOALS]
    yield from _table("What is worth offering", [*head, "needles lost at most", "holds"], rows)


def _verdict(codec: Codec, models: Mapping[str, Any]) -> list[str]:
    goal, smaller = GOALS[codec.name], codec.times_smaller(LONG)
    kl, lost = largest_kl(codec, models), needles_lost(codec, models)
    is_held = kl <= goal.max_kl and smaller >= goal.times_smaller and lost <= MAX_NEEDLES_LOST
    cells = [codec.name, f"{kl:.5f}", f"{goal.max_kl}", f"{smaller:.2f}", f"{goal.times_smaller}"]
    return [*cells, f"{100 * lost:.1f} points", "yes" if is_held else "**no**"]


def largest_kl(codec: Codec, models: Mapping[str, Any]) -> float:
    """The largest mean over all models and lengths."""
    found = (part for parts in models.values() for part in parts.values() if "codecs" in part)
    return max(float(part["codecs"][codec.name]["kl"][0]) for part in found)


def needles_lost(codec: Codec, models: Mapping[str, Any]) -> float:
    found = [parts["needles"]["found"] for parts in models.values() if "needles" in parts]
    return max((shares["exact"] - shares[codec.name] for shares in found), default=0.0)


def _speeds(speed: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        [name, side, *(f"{rates[way]:.0f}" for way in ("code", "decode"))]
        for name, sides in speed.items()
        for side, rates in sides.items()
    ]
    yield from _table(
        "In plain numpy, one core, MB of bf16 a second", ["codec", "of", "code", "decode"], rows
    )


def _stored(stored: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        [name, *(f"{rates[way]:.0f}" if way in rates else "" for way in ("round", "restore"))]
        for name, rates in stored.items()
    ]
    head = ["records", "rounded on writing", "restored from the page cache"]
    yield from _table("As Keepwarm does it, one core, MB of bf16 a second", head, rows)


def _model(name: str, parts: Mapping[str, Any]) -> Iterator[str]:
    head = ["codec", "times smaller", "KL [95 %]", "KL p99", "same top token"]
    head += ["perplexity [95 %]", "equal answers"]
    for length, found in parts.items():
        if "codecs" in found:
            rows = [_row(codec, int(length), found) for codec in CODECS]
            n_sure, n_answers = found["answers"]["exact"]
            title = f"{name}, {int(length):,} tokens, {n_answers} answers"
            yield from _table(f"{title}, {n_sure} equal without a codec", head, rows)
    if "needles" in parts:
        found = parts["needles"]
        title = f"{name}: needles found in {found['n_tokens']:,} tokens, of {found['n_answers']}"
        shares = [f"{100 * share:.1f} %" for share in found["found"].values()]
        yield from _table(title, [*found["found"]], [shares])


def _row(codec: Codec, n_tokens: int, found: Mapping[str, Any]) -> list[str]:
    figures, (n_equal, _) = found["codecs"][codec.name], found["answers"][codec.name]
    kl, low, high = figures["kl"]
    worse, least, most = (f"{100 * x:+.2f}" for x in figures["perplexity"])
    return [
        codec.name,
        f"{codec.times_smaller(n_tokens):.2f}",
        f"{kl:.5f} [{low:.5f}, {high:.5f}]",
        f"{figures['kl_p99']:.4f}",
        f"{100 * figures['top_1']:.1f} %",
        f"{worse} % [{least}, {most}]",
        f"{n_equal}",
    ]


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"\n**{title}**\n"
    yield _line(head)
    yield "|---|" + "--:|" * (len(head) - 1)
    yield from map(_line, rows)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
