"""`python -m benchmarks.price [MODEL …]`: the price of each codec on real K and V.

A model reads a text, its K and V are rounded as a stored block would be, and what follows is
compared with what follows exactly: the likelihood of the text's next tokens, answers of 64 greedy
tokens, and needles, which only the trained models of the repository find.
"""

from __future__ import annotations

import argparse
import html.entities
import inspect
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from benchmarks.price.codecs import CODECS, Codec
from benchmarks.price.page import markdown
from benchmarks.price.speed import (
    RESTORED,
    decode_rates,
    device_rates,
    first_tokens,
    stored_rates,
)
from benchmarks.price.trials import ASKING, OPENING, QUESTIONS, Reader, says_the_same, score
from benchmarks.training.corpus import read_files, roots, tokenized
from benchmarks.training.kinds import KINDS
from benchmarks.training.samples import Sample, Samples
from benchmarks.training.tokenizer import load as load_tokenizer
from keepwarm import blas, config
from keepwarm.models.load import Model, load

ROOT = Path(__file__).parents[2]
TRAINED = [ROOT / "benchmarks" / "models" / kind for kind in KINDS]
WAYS: dict[str, Codec | None] = {"exact": None, **{codec.name: codec for codec in CODECS}}
N_ANSWER = 64
NEEDLE_TOKENS = 4096
TAIL = 64  # tokens of a needle's prompt, at least, that come after the context was stored
CORPUS_BYTES = 3_000_000
PARTS = ("stored", "decode", "models", "first_token", "device")


class Sizes(NamedTuple):
    scored: int  # tokens after the context
    questions: int
    answer: int  # tokens


TINY = Sizes(64, 1, 4)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.price", description=__doc__)
    parser.add_argument("models", nargs="*", help="Default: the built-in and the trained models.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="Of the context.")
    parser.add_argument("--texts", type=int, default=3, help="That are read.")
    parser.add_argument("--scored", type=int, default=256, help="Tokens after the context.")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="To each text.")
    parser.add_argument("--needles", type=int, default=8, help="Prompts with needles, each kind.")
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", default=PARTS[:3], help="Default: the first three."
    )
    parser.add_argument("--json", type=Path, help="Read and write results here.")
    parser.add_argument("--tiny", action="store_true", help="Every step in little.")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    blas.start()
    found: dict[str, Any] = {"machine": f"{platform.machine()}, {platform.system()}", "models": {}}
    if chosen.json and chosen.json.exists():
        found = json.loads(chosen.json.read_text())
    found["date"] = datetime.now(UTC).date().isoformat()
    for part, result in results(chosen, found["models"]):
        found[part] = result
        print(f"{part}: {json.dumps(result)}", flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    if found.keys() >= set(PARTS[:3]):
        print(markdown(found))


def results(chosen: argparse.Namespace, models: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Part by part; models as far as they were measured."""
    tiny = chosen.tiny
    if "stored" in chosen.only:
        yield "stored", stored_rates(1, 1024) if tiny else stored_rates()
    if "decode" in chosen.only:
        decoding = load(str(TRAINED[0]), config.load({}))
        yield "decode", decode_rates(decoding, *((16, 1) if tiny else ()))
    if "first_token" in chosen.only:
        name, *sizes = (str(TRAINED[0]), 1024, 1) if tiny else ("smollm2", RESTORED, 5)
        seconds = first_tokens(load(name, config.load({})), *sizes)
        yield (
            "first_token",
            {"model": Path(name).name, "n_tokens": sizes[0], "seconds": seconds},
        )
    if "device" in chosen.only:
        rates = device_rates(2, 1024) if tiny else device_rates()
        yield "device", {"device": str(mx.default_device()), "rates": rates}
    default = [str(TRAINED[0])] if tiny else ["smollm2", *map(str, TRAINED)]
    for name in (chosen.models or default) if "models" in chosen.only else ():
        for part, result in measure(name, chosen):
            models.setdefault(Path(name).name, {})[part] = result
            yield "models", models


def measure(name: str, chosen: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    sizes = TINY if chosen.tiny else Sizes(chosen.scored, chosen.questions, N_ANSWER)
    model, texts = load(name, config.load({})), read_texts()[: 1 if chosen.tiny else chosen.texts]
    for n_tokens in [768] if chosen.tiny else chosen.tokens:
        for found in price(model, texts, n_tokens, sizes):
            yield str(n_tokens), found
    n_prompts = 1 if chosen.tiny else chosen.needles
    if Path(name).resolve() in TRAINED and n_prompts:
        yield "needles", needles(model, n_prompts, 1024 if chosen.tiny else NEEDLE_TOKENS)


def read_texts() -> list[str]:
    """Code, prose and a table that come with Python."""
    code, table = (inspect.getsource(module) for module in (argparse, html.entities))
    return [code, "\n".join(topics.values()), table]


def price(
    model: Model, texts: Sequence[str], n_tokens: int, sizes: Sizes
) -> Iterator[dict[str, Any]]:
    """Over all texts so far; every codec goes on from the same context."""
    scored: dict[str, list[Any]] = {codec.name: [] for codec in CODECS}
    same: dict[str, list[bool]] = {name: [] for name in WAYS}
    for text in texts:
        ids = encode(model, OPENING + text)
        reader, following = (
            Reader(model, ids[:n_tokens]),
            ids[n_tokens : n_tokens + sizes.scored + 1],
        )
        exact = reader.logits(following, None)
        for codec in CODECS:
            scored[codec.name].append(score(reader, following, exact, codec))
        for question in QUESTIONS[: sizes.questions]:
            asked = encode(model, ASKING.format(question))
            answer = reader.answer(asked, sizes.answer)
            for name, chosen in WAYS.items():
                same[name].append(says_the_same(reader, asked, answer, chosen))
        yield {
            "codecs": {
                name: summary(map(np.concatenate, zip(*s, strict=True)))
                for name, s in scored.items()
            },
            "answers": {name: [sum(equal), len(equal)] for name, equal in same.items()},
        }


def summary(scored: Iterable[Any]) -> dict[str, Any]:
    """Means with 95 % of their bootstrap over blocks of 32 tokens."""
    divergence, agrees, exact_loss, loss = scored
    return {
        "kl": interval(divergence),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "top_1": float(agrees.mean()),
        "perplexity": [float(np.expm1(x)) for x in interval(loss - exact_loss)],
        "n_scored": len(divergence),
    }


def interval(numbers: Any, block: int = 32) -> list[float]:
    """Mean, low and high."""
    n_blocks = max(1, len(numbers) // block)
    means = np.array([part.mean() for part in np.array_split(numbers, n_blocks)])
    drawn = np.random.default_rng(7).choice(means, (2000, n_blocks)).mean(1)
    return [float(x) for x in (numbers.mean(), *np.quantile(drawn, [0.025, 0.975]))]


def needles(model: Model, n_prompts: int, n_tokens: int) -> dict[str, Any]:
    """The share of answers, every token of which is the likeliest, and how many there are."""
    tokenizer = load_tokenizer()
    samples = Samples(tokenized(read_files(roots(), CORPUS_BYTES), tokenizer).held_out, tokenizer)
    right: dict[str, list[bool]] = {name: [] for name in WAYS}
    for make in (samples.needles_in_text, samples.needles_in_random):
        rng = np.random.default_rng(3)
        for sample in (make(rng, n_tokens) for _ in range(n_prompts)):
            for name, found in found_needles(model, sample).items():
                right[name] += found
    return {
        "n_tokens": n_tokens,
        "n_answers": len(right["exact"]),
        "found": {name: float(np.mean(found)) for name, found in right.items()},
    }


def found_needles(model: Model, sample: Sample) -> dict[str, list[bool]]:
    tokens, answers = sample.tokens.tolist(), sample.answers
    n_context = int(answers.argmax()) - TAIL
    reader = Reader(model, tokens[:n_context])
    found = {}
    for name, codec in WAYS.items():
        guesses = reader.logits(tokens[n_context:-1], codec).argmax(-1)
        right = guesses == sample.tokens[n_context + 1 :]
        found[name] = [bool(right[run].all()) for run in runs(answers[n_context + 1 :])]
    return found


def runs(answers: Any) -> list[slice]:
    """Where tokens of one answer lie side by side."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], answers.astype(np.int8), [0]])))
    return [slice(start, end) for start, end in edges.reshape(-1, 2)]


def encode(model: Model, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False))


if __name__ == "__main__":
    main()
