"""What measurements need of the machine: child processes, cold files, a description."""

from __future__ import annotations

import gc
import multiprocessing
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx
import psutil

from keepwarm import config
from keepwarm.device import machine
from keepwarm.errors import InsufficientResources

P = ParamSpec("P")
T = TypeVar("T")


def release_memory() -> None:
    """Collect garbage and empty MLX's buffer cache."""
    gc.collect()
    mx.clear_cache()


def in_child(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a new process, so that its memory can be measured."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        try:
            return pool.submit(work, *args, **kwargs).result()
        except BrokenProcessPool as error:
            hint = "probably out of memory; try a smaller --max-tokens"
            raise InsufficientResources(f"A benchmark process was killed, {hint}.") from error


def describe_machine() -> dict[str, Any]:
    """The class of machine and the versions installed; no host name, no path."""
    found = machine.snapshot(config.load())
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "backend": found.backend,
        "device": found.device,
        "n_cpus": found.n_cpus,
        "load": [round(x, 1) for x in psutil.getloadavg()],
        "memory_total_bytes": found.memory_total_bytes,
        "memory_available_bytes": found.memory_available_bytes,
        "gemm_gflops": round(found.gemm_gflops, 1),
        "blas": found.blas and f"{found.blas.name} ({found.blas.layer})",
        "versions": found.versions,
    }


def drop_files(files: Sequence[Path]) -> None:
    """Drop these files from the page cache."""
    release_memory()
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
