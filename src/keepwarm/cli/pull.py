"""`keepwarm pull`: download a model, or update it."""

from __future__ import annotations

from typing import Annotated

import typer

from keepwarm import config
from keepwarm.cli.options import locate_model


def pull(
    name: Annotated[str, typer.Argument(help="Built-in name, hub id (org/name), or its page.")],
) -> None:
    """Download or update a model; print its path."""
    from keepwarm.models.hub import id_of_page

    name = id_of_page(name) if "://" in name else name
    print(locate_model(name, config.load(), refresh=True))
