"""`keepwarm demo`: a two-minute demonstration of the cache."""

from __future__ import annotations

from rich.console import Console

from keepwarm import config


def demo() -> None:
    """Run three agents, kill the server, resume them.

    Compares cold and warm answers; takes about two minutes.
    """
    from keepwarm.bench.demo import play

    play(config.load().model, Console())
