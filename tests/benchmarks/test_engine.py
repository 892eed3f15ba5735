"""What is noted of running answers; scripted ones stand for an engine's."""

import threading
import time

import pytest
from benchmarks.engine import SOLO_TOKENS, Case, Running
from benchmarks.shapes import build

from keepwarm.errors import Cancelled, EngineFailed
from keepwarm.text.request import Delta


class Scripted:
    """Tokens at once, then the end, which waits to be cancelled unless it `ends` by itself."""

    def __init__(self, n_tokens=SOLO_TOKENS, error=None, *, ends=False):
        self._n_tokens, self._error, self._ends = n_tokens, error, ends
        self._cancelled = threading.Event()

    def __iter__(self):
        for _ in range(self._n_tokens):
            yield Delta(0, "a")
        if not self._ends:
            self._cancelled.wait()
        if self._error or not self._ends:
            raise self._error or Cancelled("Cancelled.")

    def cancel(self):
        self._cancelled.set()


def test_an_answer_that_stands_still_has_a_gap():
    running = Running([Scripted()])
    since = time.perf_counter()
    (gap,) = running.gaps_ms(since, since + 3)
    assert gap >= 3000
    running.stop()


def test_an_answer_that_has_ended_stands_not_still():
    running = Running([Scripted(), Scripted(ends=True)])
    time.sleep(0.1)
    now = time.perf_counter()
    (gap,) = running.gaps_ms(now, now + 3)
    assert gap >= 3000
    running.stop()


@pytest.mark.parametrize("n_tokens", [0, SOLO_TOKENS - 1])
@pytest.mark.parametrize("error", [None, EngineFailed("It broke.")])
def test_an_answer_that_ends_before_the_measurement_is_an_error(n_tokens, error):
    with pytest.raises(EngineFailed, match="It broke" if error else "ended before"):
        Running([Scripted(n_tokens, error, ends=True)])


def test_an_answer_that_fails_later_is_an_error():
    running = Running([Scripted(error=EngineFailed("It broke."))])
    running.stop()
    with pytest.raises(EngineFailed, match="It broke"):
        running.gaps_ms(0.0, time.perf_counter())


def test_bytes_of_a_long_prompt_are_those_of_its_windows_too(tmp_path):
    """Half of these layers have a window of 512."""
    case = Case(build("tiny-windows", tmp_path), None, unit=512, file=None)
    one, four = case.live_bytes(512), case.live_bytes(4 * 512)
    assert four < 3 * one
