"""`python -m benchmarks.training --kind … --minutes … --out …` trains; `--check` asks mlx-lm."""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import get_args

from . import corpus, tokenizer
from .kinds import VOCABULARY, Kind, config_of
from .samples import Samples

CORPUS_BYTES = 64_000_000
TINY_CORPUS_BYTES = 1_000_000
TOKENIZER_BYTES = 24_000_000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.training", description=__doc__)
    parser.add_argument("--kind", choices=get_args(Kind), default="attention")
    parser.add_argument("--minutes", type=float, default=8.0, help="Reading and training.")
    parser.add_argument("--out", type=Path, help="The folder of the model.")
    parser.add_argument("--workers", type=int, default=4, help="Processes that make batches.")
    parser.add_argument("--tiny", action="store_true", help="Every step in little, on a CPU.")
    parser.add_argument("--check", action="store_true", help="Compare mlx-lm with the card.")
    parser.add_argument("--rows", type=int, default=2, help="Rows of each trial of the check.")
    parser.add_argument("--make-tokenizer", action="store_true", help="Write tokenizer.json anew.")
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    if chosen.make_tokenizer:
        make_tokenizer()
        return 0
    if chosen.out is None:
        raise SystemExit("--out is missing: the folder of the model.")
    if chosen.check:
        return check_model(chosen.out, chosen.rows)
    train_model(chosen)
    return 0


def make_tokenizer() -> None:
    """Of files, and of some as they stand in the JSON of a tool call."""
    from .chat import as_json

    texts = [file.text for file in corpus.read_files(corpus.roots(), TOKENIZER_BYTES)]
    texts += [as_json(text) for text in texts[::8]]
    tokenizer.train(texts, VOCABULARY).save(str(tokenizer.PATH))


def train_model(chosen: argparse.Namespace) -> None:
    import torch

    from .evaluate import FULL, TINY, evaluate
    from .net import Net
    from .publish import round_weights, write_card, write_model, write_reference
    from .train import Plan, train

    start = time.monotonic()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = TINY if chosen.tiny else FULL
    learned, held_out, n_bytes = read_corpus(TINY_CORPUS_BYTES if chosen.tiny else CORPUS_BYTES)
    config = config_of(chosen.kind, chosen.tiny)
    net = Net(config).to(device)

    def keep() -> None:
        write_model(net, config, chosen.out)

    seconds = chosen.minutes * 60 - (time.monotonic() - start)
    plan = Plan(seconds, sizes, 1024 if chosen.tiny else 32_768, chosen.workers, device)
    trained = train(net, learned, held_out, plan, keep)
    keep()
    round_weights(net)
    figures = evaluate(net, held_out, sizes, device)
    torch.set_float32_matmul_precision("highest")
    write_reference(net, held_out, sizes.context // 2, chosen.out)
    facts = {
        "model_type": config["model_type"],
        "n_parameters": sum(weight.numel() for weight in net.parameters()),
        **trained._asdict(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "a CPU",
        "python": platform.python_version(),
        "corpus_bytes": n_bytes,
        "context": sizes.context,
        "copied": sizes.copied,
    }
    write_card(chosen.out, chosen.kind, facts, figures)
    print((chosen.out / "README.md").read_text(), flush=True)


def read_corpus(n_bytes: int) -> tuple[Samples, Samples, int]:
    """Samples to learn from, samples of files held out, and how many bytes they are of."""
    start = time.monotonic()
    words = tokenizer.load()
    texts = corpus.tokenized(corpus.read_files(corpus.roots(), n_bytes), words)
    n_code, n_prose = len(texts.train.code), len(texts.train.prose)
    print(
        f"{n_code:,} tokens of code, {n_prose:,} of prose, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    return Samples(texts.train, words), Samples(texts.held_out, words), texts.n_bytes


def check_model(folder: Path, rows: int) -> int:
    from .check import check

    checked = check(folder, rows)
    print(f"largest difference of logits: {checked.apart:.2g}")
    for name, accuracy in checked.accuracy.items():
        print(f"{name}: {accuracy:.4f}")
    print("\n".join(checked.wrong) or "as on the card")
    return 1 if checked.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
