"""Slow lines to a server, in a process of their own, so that an engine's interpreter does not slow
them down: `python -m benchmarks.remote.lines PORT BYTES_PER_S…`, until standard input ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.kit.faulty_proxy import FaultyProxy


@contextmanager
def slow_lines(port: int, bytes_per_s: Sequence[float]) -> Iterator[list[int]]:
    """Ports behind which the server sends so fast."""
    words = [str(port), *map(str, bytes_per_s)]
    command = [sys.executable, "-m", "benchmarks.remote.lines", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("It has no pipes.")
        try:
            yield [int(word) for word in process.stdout.readline().split()]
        finally:
            process.stdin.close()


def main(port: int, *bytes_per_s: float) -> None:
    proxies = [FaultyProxy(port) for _ in bytes_per_s]
    for proxy, rate in zip(proxies, bytes_per_s, strict=True):
        proxy.bytes_per_s = rate
    print(*(proxy.port for proxy in proxies), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(float, sys.argv[2:]))
