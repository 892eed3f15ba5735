"""How long a call may take."""

from __future__ import annotations

import time
from collections.abc import Callable

from keepwarm.store.blobs.backend import BlobError


class CallDeadline:
    """The end of a call, by the monotonic clock."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._at = clock() + timeout_s

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._at

    def left_s(self) -> float:
        """The seconds that are left; raises if there are none."""
        left_s = self._at - self._clock()
        if left_s <= 0:
            raise BlobError(f"no answer within {self.timeout_s * 1000:.0f} ms")
        return left_s
