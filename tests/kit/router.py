"""The stock router of examples/fleet/compose.yaml, started for a test in front of some servers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.kit.redis_server import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
START_S = 300.0


def fleet() -> Any:
    """The example, as a module."""
    spec = importlib.util.spec_from_file_location("fleet_example", EXAMPLES / "fleet.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@contextmanager
def router(urls: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a router in front of these servers, once it knows all of them."""
    if importlib.util.find_spec("sglang_router") is None:
        pytest.skip("needs `sglang-router`")
    port = free_port()
    composed = yaml.safe_load((EXAMPLES / "fleet" / "compose.yaml").read_text())["services"]
    command: list[str] = composed["router"]["command"]
    options = command[: command.index("--worker-urls")]
    options += ["--host=127.0.0.1", f"--port={port}", f"--prometheus-port={free_port()}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *options, "--worker-urls", *urls], stdout=out, stderr=out
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_S
        while _n_healthy(url) < len(urls):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def _n_healthy(url: str) -> int:
    try:
        workers = httpx.get(f"{url}/workers", verify=False).json()["workers"]
    except httpx.HTTPError:
        return 0
    return sum(worker["is_healthy"] for worker in workers)
