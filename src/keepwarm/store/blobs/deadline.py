"""How long a call may take."""

from __future__ import annotations

import time

from keepwarm.store.blobs.backend import BlobError


class CallDeadline:
    """The end of a call, by the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._at

    def left_s(self) -> float:
        """The seconds that are left; raises if there are none."""
        left_s = self._at - time.monotonic()
        if left_s <= 0:
            raise BlobError(f"no answer within {self.timeout_s * 1000:.0f} ms")
        return left_s
