"""One BLAS setting: how it is loaded, and how fast it is.

Runs by path in a child process, where a library that fails or hangs does no harm; so this file
imports the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# Idle threads that spin take the core from the thread they wait for; each library reads its
# variable while it is being loaded. What the user has set stays.
SLEEP_WHEN_IDLE = {
    "mkl": {"KMP_BLOCKTIME": "0"},
    "nvpl": {"OMP_WAIT_POLICY": "passive"},
    "openblas": {"OPENBLAS_THREAD_TIMEOUT": "4", "OMP_WAIT_POLICY": "passive"},
}
# The C names: MKL's lower-case ones take their argument by reference.
SET_THREADS = {
    "mkl": "MKL_Set_Num_Threads",
    "nvpl": "nvpl_blas_set_num_threads",
    "openblas": "openblas_set_num_threads",
}
MKL_LAYERS = {"intel": 0, "sequential": 1}

TRIAL = 2  # raise it if the measurement changes
HIDDEN, WIDE, N_WEIGHTS = 576, 1536, 8  # the products of a small Llama, in rotation
PREFILL_ROWS = 256
MAX_APART = 4  # rows that are tried one by one
MARGIN = 0.95  # of the time of one matrix: rows one by one have to be faster than this
SECONDS = 0.06  # for each figure
ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE = 101, 111, 112


@dataclass(frozen=True)
class Setting:
    name: str  # mkl, nvpl or openblas
    layer: str  # the threading layer, in the library's own word
    threads: int
    libraries: tuple[str, ...]  # paths in loading order; the last one has cblas_sgemm

    def load(self) -> ctypes.CDLL:
        """Load the libraries for the whole process, with threads that sleep when idle."""
        for variable, value in SLEEP_WHEN_IDLE[self.name].items():
            os.environ.setdefault(variable, value)
        loaded = [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in self.libraries]
        if self.name == "mkl":
            loaded[-1].MKL_Set_Threading_Layer(MKL_LAYERS[self.layer])
            loaded[-1].MKL_Set_Dynamic(0)  # use the count that was measured, and report it
        loaded[-1][SET_THREADS[self.name]](self.threads)
        return loaded[-1]


class Speed(NamedTuple):
    """GFLOP/s of a prefill-like and a decode-like product, alone and beside a busy process."""

    prefill: float
    decode: float
    prefill_contended: float
    decode_contended: float
    rows_apart: int = 1  # up to so many rows are faster one by one than as one matrix

    @property
    def score(self) -> float:
        """The geometric mean: no figure counts for more because its numbers are larger."""
        return math.prod(self[:4]) ** (1 / 4)


def measure(setting: Setting) -> Speed:
    """Load the setting into this process and time it, first alone, then with one core taken."""
    library = setting.load()
    prefill, decode = _products(library)
    one_row = partial(decode, 1)
    alone = _best(prefill), _best(one_row)
    with _busy_neighbour():
        contended = _mean(prefill), _mean(one_row)
    work = 2e-9 * HIDDEN * WIDE
    return Speed(
        prefill=PREFILL_ROWS * work / alone[0],
        decode=N_WEIGHTS * work / alone[1],
        prefill_contended=PREFILL_ROWS * work / contended[0],
        decode_contended=N_WEIGHTS * work / contended[1],
        rows_apart=_rows_apart(decode),
    )


def _rows_apart(decode: Callable[[int], None]) -> int:
    """A library may copy the whole matrix from two rows on, which takes as long as two more."""
    n_rows = 1
    while n_rows < MAX_APART and _is_faster_apart(decode, n_rows + 1):
        n_rows += 1
    return n_rows


def _is_faster_apart(decode: Callable[[int], None], n_rows: int) -> bool:
    """Both are measured in turn, so that what else the machine does disturbs both alike."""
    pairs = [(_seconds(partial(decode, 1)), _seconds(partial(decode, n_rows))) for _ in range(8)]
    apart, together = min(one for one, _ in pairs), min(both for _, both in pairs)
    return n_rows * apart < MARGIN * together


def _products(library: ctypes.CDLL) -> tuple[Callable[[], None], Callable[[int], None]]:
    """A prefill-like and a decode-like product; decode walks through weights past the caches."""
    rows = _floats(PREFILL_ROWS * HIDDEN)
    weights = [_floats(WIDE * HIDDEN) for _ in range(N_WEIGHTS)]
    out = _floats(PREFILL_ROWS * WIDE)
    _check(library, rows, weights[0], out)

    def prefill() -> None:
        _sgemm(library, PREFILL_ROWS, rows, weights[0], out)

    def decode(n_rows: int) -> None:
        for weight in weights:
            _sgemm(library, n_rows, rows, weight, out)

    return prefill, decode


def _floats(n: int) -> ctypes.Array[ctypes.c_float]:
    """Written once, because untouched memory is one shared page of zeros and reads too fast."""
    values = (ctypes.c_float * n)()
    ctypes.memset(values, 0x3F, ctypes.sizeof(values))
    return values


def _check(library: ctypes.CDLL, rows: Any, weights: Any, out: Any) -> None:
    """A wrong result (another integer width, a broken build) disqualifies the library."""
    _sgemm(library, PREFILL_ROWS, rows, weights, out)
    expected = HIDDEN * rows[0] * weights[0]
    if any(abs(out[i] - expected) > 1e-3 * expected for i in (0, len(out) - 1)):
        raise ArithmeticError(f"cblas_sgemm gives {out[0]}, expected {expected}")


def _sgemm(library: ctypes.CDLL, n_rows: int, a: Any, b: Any, out: Any) -> None:
    """out = a · bᵀ, as MLX asks for a linear layer."""
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    sizes = (n_rows, WIDE, HIDDEN)
    library.cblas_sgemm(
        *(ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE, *sizes),
        *(one, a, HIDDEN, b, HIDDEN, zero, out, WIDE),
    )


def _best(product: Callable[[], None]) -> float:
    return min(_times(product))


def _mean(product: Callable[[], None]) -> float:
    times = _times(product)
    return sum(times) / len(times)


def _times(product: Callable[[], None]) -> list[float]:
    product()
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < 3:
        times.append(_seconds(product))
    return times


def _seconds(product: Callable[[], None]) -> float:
    start = time.perf_counter()
    product()
    return time.perf_counter() - start


@contextmanager
def _busy_neighbour() -> Iterator[None]:
    """One core kept busy by another process, which ends by itself should this one be killed."""
    code = "import time; end = time.monotonic() + 5\nwhile time.monotonic() < end: pass"
    pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", code], os.environ)
    try:
        time.sleep(0.03)  # until it has started
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def trial_command(setting: Setting) -> list[str]:
    """The command that measures a setting in a process of its own and prints its Speed as JSON."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), json.dumps(asdict(setting))]


def setting_from(values: dict[str, Any]) -> Setting:
    """The setting that `asdict` and JSON wrote."""
    return Setting(**{**values, "libraries": tuple(values["libraries"])})


if __name__ == "__main__":
    speed = measure(setting_from(json.loads(sys.argv[1])))
    sys.stdout.write(json.dumps(speed._asdict()))
