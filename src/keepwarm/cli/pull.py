"""`keepwarm pull`: bring a model onto this machine, or make it the newest one."""

from __future__ import annotations

from keepwarm import config


def pull(name: str) -> None:
    """Download what is not here yet and print where it lies; loads nothing."""
    from keepwarm.engine.model import locate  # loads MLX, which other commands may not need

    print(locate(name, config.load(), refresh=True))
