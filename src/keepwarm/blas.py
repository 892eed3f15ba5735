"""A fast BLAS for MLX on Linux CPU.

The CPU build of MLX calls `cblas_sgemm` of the reference BLAS, which is 20 to 60 times slower than
the processor. A library loaded for the whole process before MLX binds that symbol takes its place:
MKL (package `mkl`, x86-64), NVPL (package `nvpl-blas`, aarch64) or the system's OpenBLAS: the first
of them that is installed. Its thread count is chosen by measurement in child processes, once a
machine, and kept in `machine.json` in the home directory, with how many rows it multiplies faster
one by one than as one matrix.

`KEEPWARM_BLAS` (`none`, `mkl`, `nvpl` or `openblas`) names another library,
`KEEPWARM_BLAS_THREADS` the number of threads. Where both are set nothing is measured.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepwarm import backend, config
from keepwarm.blas_trial import TRIAL, Setting, Speed, trial_command
from keepwarm.errors import BadInput
from keepwarm.state_file import MACHINE, StateFile

LIBRARIES = ("mkl", "nvpl", "openblas")
OPENMP = "libgomp.so.1"
TRIAL_SECONDS = 20.0
TOO_LATE = (
    "mlx.core was imported before Keepwarm, so matrix products on this CPU use MLX's own BLAS, "
    "20 to 60 times slower; put `from keepwarm import load` before the first import of mlx."
)


@dataclass(frozen=True)
class Blas:
    """The BLAS that this process uses."""

    name: str
    path: str
    layer: str
    threads: int


def start(home: Path | None = None) -> None:
    """Load a fast BLAS of this machine for the whole process; the choice is kept in `home`.

    Call it before the first matrix product; `load`, `Engine` and `Store.attach` do. It does nothing
    on macOS and CUDA, when a BLAS is already loaded, and where none is found.
    """
    if not wanted() or in_use():
        return
    found = settings(os.environ)
    if not found:
        return
    if _mlx_is_bound():
        warnings.warn(TOO_LATE, RuntimeWarning, stacklevel=3)
        return
    # A library that was asked for is not tried first: if it does not load, that is said.
    is_forced = os.environ.get("KEEPWARM_BLAS") and os.environ.get("KEEPWARM_BLAS_THREADS")
    setting = found[0] if is_forced else choose(home or config.load().home, found)
    if setting:
        _load(setting)


def _mlx_is_bound() -> bool:
    """Whether `mlx.core` was imported in the usual way, its own BLAS bound for good."""
    ours = sys.modules.get("keepwarm.mlx_import")
    return "mlx.core" in sys.modules and (ours is None or ours.BOUND_EARLY)


def _load(setting: Setting) -> None:
    try:
        setting.load()
    except OSError as error:
        hint = "set KEEPWARM_BLAS to another, or to none"
        raise BadInput(f"The {setting.name} BLAS does not load ({error}); {hint}.") from error


def wanted() -> bool:
    """Whether MLX is the Linux CPU build here, asked of the installed packages."""
    if sys.platform != "linux":
        return False
    return backend.installed() == ("mlx-cpu",)


def cpus() -> list[int]:
    """The processors that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


# What there is to choose from.


def settings(environ: Mapping[str, str]) -> list[Setting]:
    """The thread counts that the environment allows, of the first library that is installed."""
    asked = environ.get("KEEPWARM_BLAS", "").lower()
    if asked and asked not in {"none", *LIBRARIES}:
        raise BadInput(f"KEEPWARM_BLAS is {asked!r}; use none, {', '.join(LIBRARIES)} or unset it.")
    if asked == "none":
        return []
    threads = _asked_threads(environ) or thread_counts(len(cpus()))
    found = {"mkl": _mkl, "nvpl": _nvpl, "openblas": _openblas}
    each = (list(found[name](threads)) for name in LIBRARIES if asked in {"", name})
    first = next(filter(None, each), [])
    if asked and not first:
        raise BadInput(
            f"KEEPWARM_BLAS asks for {asked}, which is not installed, or not for so many threads; "
            "unset it."
        )
    return first


def _asked_threads(environ: Mapping[str, str]) -> list[int]:
    text = environ.get("KEEPWARM_BLAS_THREADS", "")
    if not text:
        return []
    if not text.isdecimal() or int(text) < 1:
        raise BadInput(f"KEEPWARM_BLAS_THREADS is {text!r}; use a positive number, or unset it.")
    return [int(text)]


def thread_counts(n_cpus: int) -> list[int]:
    """1, 2, 4, … and all of them."""
    return sorted({2**i for i in range(n_cpus.bit_length())} | {n_cpus})


def _mkl(threads: list[int]) -> Iterator[Setting]:
    """Never the GNU layer, whose threads spin: ten times slower beside a busy process."""
    openmp = _shipped("intel-openmp", "libiomp5.so")
    for path in _shipped("mkl", "libmkl_rt.so.*"):
        for n in threads:
            if n == 1:
                yield Setting("mkl", "sequential", 1, (path,))
            elif openmp:
                yield Setting("mkl", "intel", n, (openmp[0], path))


def _nvpl(threads: list[int]) -> Iterator[Setting]:
    """Several threads need the system's OpenMP, without which NVPL ends the process."""
    openmp = _of_the_system(OPENMP)
    for core in _shipped("nvpl-blas", "libnvpl_blas_core.so.*"):
        for n in threads if openmp else {1} & {*threads}:
            layer, first = ("seq", ()) if n == 1 else ("gomp", tuple(openmp[:1]))
            for path in _shipped("nvpl-blas", f"libnvpl_blas_lp64_{layer}.so.*"):
                yield Setting("nvpl", layer, n, (*first, core, path))


def _openblas(threads: list[int]) -> Iterator[Setting]:
    """The system's; the one inside numpy renames its symbols, so MLX cannot find them."""
    names = ("libopenblas.so.0", "libopenblasp.so.0")  # Fedora's second one has threads
    for path in _of_the_system(*names)[:1]:
        yield from (Setting("openblas", "built-in", n, (path,)) for n in threads)


def lacks_threads() -> bool:
    """Whether several threads are not to be had for want of the system's OpenMP."""
    return bool(_shipped("nvpl-blas", "libnvpl_blas_core.so.*")) and not _of_the_system(OPENMP)


def _of_the_system(*names: str) -> list[str]:
    """Paths of the system's libraries that have one of these names."""
    folders = [Path(sys.prefix, "lib"), *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64")]
    paths = (folder / name for folder in folders for name in names)
    return [str(path) for path in paths if path.exists()]


def _shipped(distribution: str, pattern: str) -> list[str]:
    """Paths of the files of an installed package whose name matches."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [str(Path(str(f.locate())).resolve()) for f in files if f.match(pattern)]


# The choice.


def choose(home: Path, found: list[Setting]) -> Setting | None:
    """The remembered setting, else the fastest one measured, else None where none runs."""
    file: StateFile[dict[str, Any]] = StateFile(home / MACHINE, "blas", dict)
    depends, kept = _depends(found), file.read()
    by_threads = {setting.threads: setting for setting in found}
    if kept.get("depends") == depends and kept.get("threads") in by_threads:
        return by_threads[kept["threads"]]
    speeds = {n: speed for n, setting in by_threads.items() if (speed := trial(setting))}
    if not speeds:
        return None
    scores = {n: speed.score for n, speed in speeds.items()}
    best = max(scores, key=scores.__getitem__)
    choice = {
        "library": found[0].name,
        "threads": best,
        "scores": scores,
        "rows_apart": speeds[best].rows_apart,
    }
    with suppress(OSError):  # the next start measures again
        file.change(lambda _: {"depends": depends, **choice})
    return by_threads[best]


def rows_apart(home: Path) -> int:
    """Up to so many rows are faster one by one; one, where the BLAS in use was not measured."""
    used = in_use()

    def measured(kept: Mapping[str, Any]) -> int:
        if not used or not kept or kept["depends"]["processor"] != _processor():
            return 1
        is_in_use = [used.name, used.threads] == [kept["library"], kept["threads"]]
        return int(kept["rows_apart"]) if is_in_use else 1

    return StateFile(home / MACHINE, "blas", measured).read()


def _depends(found: list[Setting]) -> dict[str, Any]:
    """What a measurement is true for: processor, share of it, and the very files."""
    files = sorted({path for setting in found for path in setting.libraries})
    return {
        "trial": TRIAL,
        "processor": _processor(),
        "cpus": cpus(),
        "quota": _text(Path("/sys/fs/cgroup/cpu.max")),
        "files": [_identity(Path(path)) for path in files],
        "settings": [[s.name, s.layer, s.threads] for s in found],
    }


def _identity(path: Path) -> list[str | int]:
    """Path, size and time: an upgraded library is another one."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def _processor() -> str:
    """Names without hertz, which change; host names are left out, containers invent them."""
    first = _text(Path("/proc/cpuinfo")).split("\n\n")[0]
    named = re.findall(r"^(?:model name|CPU implementer|CPU part)\s*: (.*)$", first, re.MULTILINE)
    return " ".join([platform.machine(), *named])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def trial(setting: Setting) -> Speed | None:
    """Speed of the setting in a process of its own, or None where it does not run."""
    try:
        run = subprocess.run(
            trial_command(setting), capture_output=True, timeout=TRIAL_SECONDS, check=True
        )
        return Speed(**json.loads(run.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None


# What is really there.


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def in_use() -> Blas | None:
    """The library that `cblas_sgemm` resolves to in this process, or None for MLX's own."""
    if sys.platform != "linux":
        return None
    process = ctypes.CDLL(None)
    if not hasattr(process, "cblas_sgemm"):
        return None
    info = _SymbolInfo()
    process.dladdr(ctypes.cast(process.cblas_sgemm, ctypes.c_void_p), ctypes.byref(info))
    path = os.fsdecode(info.file)
    name = next((name for name in LIBRARIES if name in Path(path).name), Path(path).name)
    return Blas(name, path, *_layer_and_threads(name, path, process))


def _layer_and_threads(name: str, path: str, process: ctypes.CDLL) -> tuple[str, int]:
    """As reported by the library; an unknown one is assumed to use one thread."""
    if name == "mkl":
        threads = process.MKL_Get_Max_Threads()  # also makes MKL load its layer
        layer = re.search(r"libmkl_(intel|sequential|gnu|tbb)", _layers_of_mkl())
        return (layer[1] if layer else "unknown"), threads
    if name == "nvpl":
        return ("seq" if "_seq." in path else "gomp"), process.nvpl_blas_get_max_threads()
    if name == "openblas":
        layers = ("sequential", "pthreads", "openmp")
        return layers[process.openblas_get_parallel()], process.openblas_get_num_threads()
    return "unknown", 1


def _layers_of_mkl() -> str:
    maps = _text(Path("/proc/self/maps"))
    return " ".join(re.findall(r"libmkl_\w*(?:thread|sequential)\b", maps))
