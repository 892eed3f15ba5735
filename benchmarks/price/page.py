"""The tables of docs/results/price.md from docs/results/price.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.price.codecs import CODECS, Q4, Q4_BY_BLOCK, Q8, Codec

LONG = 8192  # tokens of the conversation whose bytes are compared
MAX_NEEDLES_LOST = 0.02


class Goal(NamedTuple):
    """What a codec must hold to be offered, on every model and at every length."""

    max_kl: float
    times_smaller: float


GOALS = {
    Q8.name: Goal(0.0005, 1.85),
    **dict.fromkeys((Q4.name, Q4_BY_BLOCK.name), Goal(0.004, 3.0)),
}


def markdown(found: Mapping[str, Any]) -> str:
    """What is offered, the speed, and the tables, model by model."""
    lines = [*_verdicts(found["models"]), *_agents(), *_stored(found["stored"])]
    lines += _first_token(found["first_token"]) if "first_token" in found else []
    lines += _decode(found["decode"])
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


class Shape(NamedTuple):
    """What a model keeps: numbers of a token that every layer adds, and of windows, which are never
    rounded and hold so many tokens."""

    name: str
    per_token: int
    window: int = 0

    def agents(self, codec: Codec | None, n_tokens: int) -> float:
        """Conversations of so many tokens in AGENT_BYTES."""
        smaller = codec.times_smaller(n_tokens) if codec else 1.0
        n_bytes = 2 * (n_tokens * self.per_token / smaller + self.window)
        return AGENT_BYTES / n_bytes


AGENT_BYTES, AGENT_TOKENS = 10e9, 32768
PUBLISHED = 3.38 * 2**30  # of a conversation with Gemma 3 12B: arXiv 2603.04428
SHAPES = (
    Shape("Llama-8B: 32 layers, 8 heads of 128", 2 * 32 * 8 * 128),
    Shape("Gemma-3-12B: 48 layers, 8 with every token", 2 * 8 * 8 * 256, 2 * 40 * 8 * 256 * 1280),
    Shape("DeepSeek-V3, latent attention: 61 layers of 576", 61 * 576),
)


def _agents() -> Iterator[str]:
    rows = [
        [shape.name, *(f"{shape.agents(codec, AGENT_TOKENS):.1f}" for codec in (None, Q8, Q4))]
        for shape in SHAPES
    ]
    rows[1].append(f"{AGENT_BYTES / PUBLISHED:.1f}")
    title = f"Conversations of {AGENT_TOKENS:,} tokens in 10 GB, bf16"
    yield from _table(title, ["", "exact", "q8", "q4", "published, 4 bits"], rows)


def _stored(stored: Mapping[str, Any]) -> Iterator[str]:
    for kind, codecs in stored.items():
        rows = [
            [name, *(f"{rates[way]:.0f}" if way in rates else "" for way in ("round", "restore"))]
            for name, rates in codecs.items()
        ]
        head = ["records", "rounded", "restored from the page cache"]
        yield from _table(f"One core, MB of {kind} a second", head, rows)


def _first_token(found: Mapping[str, Any]) -> Iterator[str]:
    ways = {"cold": "from disk", "warm": "from the page cache"}
    rows = [
        [name, *(f"{float(f'{seconds[way]:.2g}'):g}" for way in ways)]
        for name, seconds in found["seconds"].items()
    ]
    title = f"{found['model']} in fp32, seconds until a conversation of {found['n_tokens']:,}"
    yield from _table(f"{title} restored tokens goes on", ["records", *ways.values()], rows)


def _decode(rates: Mapping[str, float]) -> Iterator[str]:
    shares = [f"{rate / rates['exact']:.2f}" for rate in rates.values()]
    yield from _table("Tokens decoded in a second of processor time", [*rates], [shares])


def _model(name: str, parts: Mapping[str, Any]) -> Iterator[str]:
    head = ["codec", "times smaller", "KL [95 %]", "KL p99", "same top token"]
    head += ["perplexity [95 %]", "equal answers"]
    for length, found in parts.items():
        if "codecs" in found:
            rows = [_row(codec, int(length), found) for codec in CODECS]
            n_sure, n_answers = found["answers"]["exact"]
            many = "s" if n_answers > 1 else ""
            title = f"{name}, {int(length):,} tokens, {n_answers} answer{many}"
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
    yield from (_line([*row, *[""] * (len(head) - len(row))]) for row in rows)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
