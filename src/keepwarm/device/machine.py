"""A snapshot of this machine: backend, speed, memory, disk, versions."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import psutil

from keepwarm import __version__, blas
from keepwarm.config import Settings
from keepwarm.device import kernels
from keepwarm.device.memory import GIB
from keepwarm.device.space import free_disk_bytes
from keepwarm.state_file import MACHINE

# Rows, depth and columns of a prefill; larger ones are skipped on slow machines.
GEMM_SHAPES = ((512, 576, 1536), (1024, 2048, 2048), (4096, 4096, 4096))
GEMM_SECONDS = 0.12  # for each shape
PACKAGES = ("mlx", "mlx-lm", "transformers")


@dataclass(frozen=True)
class Machine:
    backend: str  # metal, cuda or cpu
    device: str
    blas: blas.Blas | None  # None: MLX's own
    n_cpus: int  # that this process may use
    gemm_gflops: float  # fp32, through MLX
    memory_total_bytes: int
    memory_available_bytes: int
    home: Path
    store: Path
    free_disk_bytes: int  # of the store's file system
    versions: dict[str, str]
    n_kernels: int | None = None  # kept from earlier starts; None: none are compiled here
    advice: str = ""  # one line: what would make this machine faster


def snapshot(settings: Settings) -> Machine:
    """Inspect and measure the machine; takes under a second."""
    blas.start(settings.home)
    kernels.start(settings.home)
    memory = psutil.virtual_memory()
    machine = Machine(
        backend=backend(),
        device=_device_name(),
        blas=blas.in_use(),
        n_cpus=len(blas.cpus()),
        gemm_gflops=gemm_gflops(),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        home=settings.home,
        store=settings.store,
        free_disk_bytes=free_disk_bytes(settings.store),
        versions=_versions(),
        n_kernels=kernels.n_kept(settings.home) if kernels.are_compiled() else None,
    )
    return replace(machine, advice=_advice(machine))


def backend() -> str:
    """MLX's default backend."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def architecture() -> str:
    """The family of the processor, or of the GPU if that computes."""
    return str(mx.device_info().get("architecture", platform.machine()))


def speed_class() -> str:
    """What the time of a computation depends on: the processor or GPU by name, and how many."""
    return f"{backend()} {_device_name()} {len(blas.cpus())}"


def gemm_gflops() -> float:
    """The best fp32 matrix product that MLX reaches here, in GFLOP/s."""
    best = 0.0
    for shape in GEMM_SHAPES:
        if best == 0 or _gflop(shape) / best < GEMM_SECONDS:
            best = max(best, _gflop(shape) / _best_seconds(shape))
    return best


def _gflop(shape: tuple[int, int, int]) -> float:
    return 2e-9 * math.prod(shape)


def _best_seconds(shape: tuple[int, int, int]) -> float:
    rows, depth, columns = shape
    key = mx.random.key(0)  # a separate key leaves the global seed unchanged
    a, b = mx.random.normal((rows, depth), key=key), mx.random.normal((columns, depth), key=key)
    mx.eval(a, b)
    best, end = math.inf, time.perf_counter() + GEMM_SECONDS
    while (start := time.perf_counter()) < end:
        mx.eval(a @ b.T)
        best = min(best, time.perf_counter() - start)
    return best


def _device_name() -> str:
    """MLX's name for it; on Linux CPUs that is only the architecture, so the kernel's is used."""
    name = str(mx.device_info().get("device_name", platform.machine()))
    return _processor_name() or name if backend() == "cpu" else name


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"keepwarm": __version__, **packages, "python": platform.python_version()}


def _advice(machine: Machine) -> str:
    if machine.memory_available_bytes < GIB:
        return "Less than 1 GiB of memory is free: close other programs."
    if machine.backend != "cpu":
        return "Nothing to suggest."
    return _advice_on_gpu() or _advice_on_blas(machine) or "No GPU found; running on CPU."


def _advice_on_gpu() -> str:
    if not _has_nvidia_gpu():
        return ""
    return "There is an NVIDIA GPU, but MLX runs on the CPU: install with `make BACKEND=cuda`."


def _has_nvidia_gpu() -> bool:
    try:
        run = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return b"GPU" in run.stdout


def _advice_on_blas(machine: Machine) -> str:
    if not blas.wanted():
        return ""
    if machine.blas is None:
        return _advice_without_blas()
    used, n_cpus = machine.blas.threads, machine.n_cpus
    if used >= n_cpus:
        return ""
    if os.environ.get("KEEPWARM_BLAS_THREADS"):
        return (
            f"KEEPWARM_BLAS_THREADS limits BLAS to {used} of {n_cpus} cores: unset it to use more."
        )
    if blas.lacks_threads():
        return (
            f"BLAS uses {used} of {n_cpus} cores because {blas.OPENMP} is missing: install it "
            "(Debian: apt install libgomp1)."
        )
    file = machine.home / MACHINE
    return (
        f"BLAS uses {used} of {n_cpus} cores because more were no faster when measured: "
        f"if the machine was busy then, delete {file} to measure again."
    )


def _blas_package() -> str:
    return "mkl" if platform.machine() == "x86_64" else "nvpl-blas"


def _advice_without_blas() -> str:
    if os.environ.get("KEEPWARM_BLAS") == "none":
        return "KEEPWARM_BLAS=none turns the fast BLAS off: unset it for a much faster prefill."
    return (
        "No fast BLAS was found, so matrix products run many times slower than possible: "
        f"pip install {_blas_package()}, or the system's OpenBLAS "
        "(Debian: apt install libopenblas0)."
    )
