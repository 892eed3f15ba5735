"""`keepwarm pull`: bring a model onto this machine, or make it the newest one."""

from __future__ import annotations

from typing import Annotated

import typer

from keepwarm import config


def pull(
    name: Annotated[str, typer.Argument(help="Built-in name, or hub id (org/name).")],
) -> None:
    """Download a model, as far as it is not here yet, and print where it lies."""
    from keepwarm.models.catalog import locate

    print(locate(name, config.load(), refresh=True))
