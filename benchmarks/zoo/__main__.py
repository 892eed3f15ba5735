"""`python -m benchmarks.zoo [type …]`: every model type of mlx-lm through the engine, tiny."""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.zoo.models import model_types
from benchmarks.zoo.page import page, summary
from benchmarks.zoo.trials import EXACT, Findings, examine
from keepwarm.bench.measure import describe_machine


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Model types; all if none.")] = None,
    write: Annotated[Path | None, typer.Option("--page", help="Write the page here.")] = None,
) -> None:
    """Compare whatever is warm with a cold run; exit code 1 if anything differs."""
    findings: list[Findings] = []
    with tempfile.TemporaryDirectory(prefix="keepwarm-zoo-") as folder:
        for name in names or model_types():
            findings.append(examine(name, Path(folder)))
            print(f"{name}: {findings[-1].verdict}", flush=True)
    print(summary(findings))
    if write is not None:
        version = importlib.metadata.version("mlx-lm")
        machine = str(describe_machine().get("device", "this machine"))
        write.write_text(page(findings, version, machine, EXACT))
    sys.exit(any(one.wrong for one in findings))


if __name__ == "__main__":
    typer.run(main)
