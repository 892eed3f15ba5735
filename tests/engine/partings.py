"""`python -m tests.engine.partings`: what is computed again where prompts part, by layer kind.

Recorded conversations (benchmarks/requests/data/README.md) and new sessions of coding agents
(docs/results/sessions.json), their lengths divided, as raw prompts for tiny models: without
messages nothing says beforehand where another prompt may part. A prompt *parts at a known place*
where an earlier one has parted from the same tokens. A place less than NEAR tokens behind another
is not kept, and does not count.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from benchmarks.requests.recorded import load, requests

from keepwarm import blas
from keepwarm.prefix.blocks import common_tokens, pack
from keepwarm.store.eviction import NEAR
from tests.kit.engines import Models, ask, engine_on, memory
from tests.kit.models import VOCABULARY

KINDS = {"rows": "llama", "rows and windows": "gpt_oss", "rows and states": "qwen3_next"}
SESSIONS = Path(__file__).parents[2] / "docs" / "results" / "sessions.json"
GIB = 1 << 30
CONTINUES, NEW, KNOWN = "continues", "parts, new place", "parts, known place"


class Prompt(NamedTuple):
    tokens: list[int]
    kind: str  # of place where it parts from what came before
    n_shared: int


class Tree:
    """The prompts so far, and where they parted."""

    def __init__(self, seed: int) -> None:
        self._ids = np.random.default_rng(seed)
        self._earlier: list[bytes] = []
        self._partings: set[bytes] = set()

    def new(self, n_tokens: int) -> list[int]:
        return [int(one) for one in self._ids.integers(VOCABULARY, size=n_tokens)]

    def add(self, tokens: list[int]) -> Prompt:
        packed = pack(tokens)
        n_shared = max((common_tokens(one, packed) for one in self._earlier), default=0)
        place = packed[: 4 * n_shared]
        kind = CONTINUES if place in self._earlier else KNOWN if place in self._partings else NEW
        if kind != CONTINUES:
            self._partings.add(place)
        self._earlier.append(packed)
        return Prompt(tokens, kind, n_shared)


def recorded(n_conversations: int, divisor: int) -> Iterator[Prompt]:
    """As the trace says, a prompt begins as the one before it in its conversation; answers are
    rendered again, so it goes on after the prompt and not after the answer."""
    tree, last = Tree(0), defaultdict[int, list[int]](list)
    for one in requests(load(n_conversations, divisor)):
        before = last[one.conversation][: one.n_common]
        last[one.conversation] = [*before, *tree.new(one.n_input - len(before))]
        if len(last[one.conversation]) > 1:
            yield tree.add(last[one.conversation])


def sessions(divisor: int) -> Iterator[Prompt]:
    """Three sessions in one project and three in others, of each client and template."""
    clients = json.loads(SESSIONS.read_text())["clients"]
    kinds = [kind for client in clients.values() for kind in client["kinds"].values()]
    for seed, counts in enumerate(setting for kind in kinds for setting in kind.values()):
        tree = Tree(seed)
        first = tree.new(counts["first"]["prompt"] // divisor)
        yield tree.add(first)
        for _ in range(3):
            for place in ("same", "other"):
                n_prompt, n_new = (counts[place][k] // divisor for k in ("prompt", "computed"))
                yield tree.add([*first[: n_prompt - n_new], *tree.new(n_new + 1)])


def main(
    conversations: Annotated[int, typer.Option(help="Of the trace, its first ones.")] = 4,
    divisor: Annotated[int, typer.Option(help="Of the lengths in the trace.")] = 128,
    of_sessions: Annotated[int, typer.Option(help="Of the lengths in sessions.")] = 8,
) -> None:
    """Exit code 1 if anything was computed again where a place was known."""
    blas.start()
    prompts = {
        "traces": list(recorded(conversations, divisor)),
        "new sessions": list(sessions(of_sessions)),
    }
    again = 0
    for source, asked in prompts.items():
        for layers, architecture in KINDS.items():
            counts = _run(architecture, asked)
            again += counts[KNOWN][2]
            for kind, (n, n_shared, n_again) in counts.items():
                row = f"| {source} | {layers} | {kind} | {n:,} | {n_shared:,} | {n_again:,} |\n"
                sys.stdout.write(row)
                sys.stdout.flush()
    sys.exit(again > 0)


def _run(architecture: str, prompts: list[Prompt]) -> dict[str, list[int]]:
    """By kind of place: prompts, tokens shared with earlier ones, and of them computed again."""
    counts = {kind: [0, 0, 0] for kind in (CONTINUES, NEW, KNOWN)}
    with tempfile.TemporaryDirectory() as folder:
        model = replace(Models(Path(folder)).of(architecture), n_context=1 << 20)
        large = memory(live_bytes=GIB, tier_bytes=GIB, batch_bytes=GIB)
        with engine_on(model, Path(folder), memory=large) as engine:
            for tokens, kind, n_shared in prompts:
                receipt = engine.submit(ask(tokens, 1)).result().receipt
                found = min(n_shared, len(tokens) - 1)
                n_again = found - receipt.cached_tokens
                known = (1, found, n_again if n_again >= NEAR else 0)
                counts[kind] = [a + b for a, b in zip(counts[kind], known, strict=True)]
    return counts


if __name__ == "__main__":
    typer.run(main)
