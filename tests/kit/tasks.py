"""Tasks for a preparing process; they import next to nothing, because it does what they do."""

import os
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Nothing:
    """A recipe."""

    def build(self) -> str:
        return "built"


@dataclass(frozen=True)
class Slow:
    """One that takes its time."""

    seconds: float

    def build(self) -> str:
        time.sleep(self.seconds)
        return "built"


@dataclass
class Loaded:
    """Counts."""

    seconds: float
    n_loads: int = 0

    def load(self) -> None:
        time.sleep(self.seconds)
        self.n_loads += 1


@dataclass(frozen=True)
class Loads:
    """One with something to load, which takes its time."""

    seconds: float = 0.0

    def build(self) -> Loaded:
        return Loaded(self.seconds)


class Unloadable:
    """What cannot be loaded."""

    def load(self) -> None:
        raise OSError("no such vocabulary")


@dataclass(frozen=True)
class LoadFails:
    """One with something to load that cannot be."""

    def build(self) -> Unloadable:
        return Unloadable()


def report(tools: Any, _channel: Any, *given: Any) -> tuple[Any, ...]:
    return tools, given, os.getpid()


def knows_vocabulary(tools: Any, _channel: Any) -> bool:
    return tools.grammars._vocabulary is not None


def modules(_tools: Any, _channel: Any) -> list[str]:
    return sorted(sys.modules)


def spin(_tools: Any, channel: Any) -> None:
    channel.ask("spinning")
    while True:
        pass


def sleep(_tools: Any, channel: Any) -> None:
    channel.ask("asleep")
    time.sleep(600)


def crash(_tools: Any, _channel: Any) -> None:
    os._exit(1)


def fail(_tools: Any, _channel: Any) -> None:
    raise KeyError("no such thing")
