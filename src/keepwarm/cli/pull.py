"""`keepwarm pull`: download a model, or update it."""

from __future__ import annotations

from typing import Annotated

import typer

from keepwarm import config


def pull(
    name: Annotated[str, typer.Argument(help="Built-in name, or hub id (org/name).")],
) -> None:
    """Download a model if missing; print its path."""
    from keepwarm.models.catalog import locate

    print(locate(name, config.load(), refresh=True))
