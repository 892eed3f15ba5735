"""What has happened in an engine since it started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Tokens are counted where the model is called. Written by the engine's thread alone."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    rebuilt_tokens: int = 0  # read again because a batch died
    audited_tokens: int = 0  # read again to compare a restored cache with a cold one
    generated_tokens: int = 0
    waited_for_prefix: int = 0
    rebuilt_batches: int = 0
    failed_saves: int = 0
    audits: int = 0
    drifts: int = 0  # audits whose answer differed
    reused_tokens: dict[str, int] = field(default_factory=dict)  # by place
    saved_ms: float = 0.0

    def audited(self, equal: bool) -> None:
        self.audits += 1
        self.drifts += not equal

    def add_reused(self, reused: Mapping[str, int]) -> None:
        for place, n_tokens in reused.items():
            self.reused_tokens[place] = self.reused_tokens.get(place, 0) + n_tokens
