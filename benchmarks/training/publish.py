"""A trained model as a folder that mlx-lm loads, with its card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from . import tokenizer
from .evaluate import Figures
from .kinds import Config, Kind
from .samples import Samples

GOALS = {  # trial: (field, at least)
    "copy random tokens": ("accuracy", 0.99),
    "copy code": ("accuracy", 0.99),
    "needle in random tokens": ("accuracy", 0.9),
    "needle in code": ("accuracy", 0.9),
}
N_COMPARED = 8  # the last positions of a row, whose logits are kept


def write_model(net: nn.Module, config: Config, folder: Path) -> None:
    """Weights, config and tokenizer; each file is whole at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16) for name, value in _weights(net)}
    save_file(weights, folder / "new", metadata={"format": "mlx"})
    (folder / "new").rename(folder / "model.safetensors")
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", tokenizer.CONFIG)
    shutil.copyfile(tokenizer.PATH, folder / "tokenizer.json")


def write_card(
    folder: Path, kind: Kind, facts: dict[str, Any], figures: dict[str, Figures]
) -> None:
    card = {
        "kind": kind,
        **facts,
        "figures": {name: row._asdict() for name, row in figures.items()},
    }
    _write_json(folder / "card.json", card)
    (folder / "README.md").write_text(page(card), encoding="utf-8")


def write_reference(net: nn.Module, samples: Samples, context: int, folder: Path) -> None:
    """Logits that another program must find too, in float32 from the published weights."""
    rng = np.random.default_rng(11)
    rows = [samples.needles_in_text(rng, context), samples.tools(rng, context)]
    tokens = torch.from_numpy(np.stack([row.tokens for row in rows])).long()
    with torch.inference_mode():
        logits = (
            net(tokens.to(next(net.parameters()).device))[:, -N_COMPARED:]
            .float()
            .cpu()
            .contiguous()
        )
    save_file({"tokens": tokens.int(), "logits": logits}, folder / "reference.safetensors")


def round_weights(net: nn.Module) -> None:
    """To what is published, so that figures are its own."""
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(weight.bfloat16())


def page(card: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {row['loss']:.3f} | {row['accuracy']:.2%} | {row['whole']:.2%}"
        f" | {row['top_probability']:.3f} | {_goal(name, row)} |"
        for name, row in card["figures"].items()
    ]
    return "\n".join(
        [
            f"# {card['kind']}",
            "",
            f"{card['n_parameters']:,} parameters ({card['model_type']}), trained in"
            f" {card['seconds']:.0f} s on {card['device']}: {card['steps']:,} steps,"
            f" {card['tokens']:,} tokens. Text and code: the files of an installation of Python"
            f" {card['python']}, {card['corpus_bytes']:,} bytes, one file in 50 held out.",
            "",
            f"Rows of {card['context']:,} tokens, copies of {card['copied']:,}; figures over the"
            " answers, or over all tokens of prose and code."
            " Made by `python -m benchmarks.training`.",
            "",
            "| trial | loss | tokens right | answers right | mean top probability | goal |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _goal(name: str, row: dict[str, float]) -> str:
    if name not in GOALS:
        return ""
    field, least = GOALS[name]
    return f"≥ {least:.0%} {'reached' if row[field] >= least else 'missed'}"


def _weights(net: nn.Module) -> list[tuple[str, Tensor]]:
    return list(net.named_parameters())


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
