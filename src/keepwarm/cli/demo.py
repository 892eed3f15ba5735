"""`keepwarm demo`: two minutes that show what the cache is for."""

from __future__ import annotations

from rich.console import Console

from keepwarm import config


def demo() -> None:
    """Let three agents work, kill the server, let them go on; cold against warm."""
    from keepwarm.bench.demo import play

    play(config.load().model, Console())
