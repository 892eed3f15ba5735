"""Server processes for tests: the program itself, or one with small budgets and a model that fails.

python -m tests.server.processes CHECKPOINT     what `keepwarm serve` does, but for its memory
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from keepwarm import config

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@dataclass(frozen=True)
class Served:
    """A running process and where it answers."""

    process: subprocess.Popen[str]
    url: str

    @property
    def pid(self) -> int:
        return self.process.pid


PROGRAM = ("-m", "keepwarm", "serve", "--port", "0", "--model")
SMALL = ("-m", "tests.server.processes")
PATIENT = ("-m", "tests.server.patient")  # with deadlines that a busy machine keeps too


@contextmanager
def served(
    checkpoint: Path,
    home: Path,
    *,
    command: tuple[str, ...] = PROGRAM,
    log: IO[str] | int = subprocess.PIPE,
    **environ: str,
) -> Iterator[Served]:
    """A server process, until the test ends, however it does.

    It logs warnings: a pipe that nobody reads would fill with the lines of requests.
    """
    quiet = {"KEEPWARM_LOG_LEVEL": "warning"}
    process = subprocess.Popen(
        [sys.executable, *command, str(checkpoint)],
        cwd=ROOT,
        env={**os.environ, "KEEPWARM_HOME": str(home), **quiet, **environ},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    try:
        assert process.stdout is not None
        greeting = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", greeting)
        if found is None:
            process.kill()
            raise AssertionError(greeting + "".join(filter(None, process.communicate())))
        yield Served(process, found[0])
    finally:
        process.kill()
        process.communicate()


class Breaks:
    """A model that fails whenever it is fed one token, and quotes all it was fed."""

    def __init__(self, module: Any, token: int, tokenizer: Any) -> None:
        self._module = module
        self._token = token
        self._tokenizer = tokenizer

    def __call__(self, tokens: Any, *arguments: Any, **options: Any) -> Any:
        if (tokens == self._token).any().item():
            quoted = self._tokenizer.decode(tokens.flatten().tolist())
            raise RuntimeError(f"the model broke at {quoted!r}")
        return self._module(tokens, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _fail() -> None:
    raise RuntimeError("an illegal memory access was encountered")


def main(checkpoint: str) -> None:
    """Serve with budgets so small that whatever grows is a leak."""
    from keepwarm.cache.store import Store
    from keepwarm.concurrency import DeviceLock
    from keepwarm.device.memory import MemoryConfig
    from keepwarm.engine.admission import EngineConfig
    from keepwarm.engine.engine import Engine
    from keepwarm.models.load import load
    from keepwarm.server.app import create_app
    from keepwarm.server.models.host import EngineHost
    from keepwarm.server.models.models import Models
    from keepwarm.server.process import address_of, bind, serve

    settings = config.load()
    memory = MemoryConfig(32 * MIB, 16 * MIB, 8 * MIB, 8 * MIB, 256 * MIB)
    model = load(checkpoint, settings)
    if "KEEPWARM_BREAKS_AT" in os.environ:
        module = Breaks(model.module, int(os.environ["KEEPWARM_BREAKS_AT"]), model.tokenizer)
        model = replace(model, module=module)
    with bind(settings.host, 0) as listening, Store(settings=settings) as store:
        device = DeviceLock(_fail) if "KEEPWARM_LOSES_DEVICE" in os.environ else None
        engine = Engine(model, store, EngineConfig(memory), settings=settings, device=device)
        app = create_app(Models(EngineHost(engine, model.name), settings), settings)
        listening.listen()  # who reads the next line connects at once
        sys.stdout.write(f"answers at {address_of(listening)}\n")
        sys.stdout.flush()
        serve(lambda: app, settings, listening)


if __name__ == "__main__":
    main(sys.argv[1])
