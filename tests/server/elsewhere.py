"""A prompt computed by one process and restored by another, and what that takes.

python -m tests.server.elsewhere [MODEL]     one line per prompt, then medians
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tests.server.processes import served

N_ROUNDS = 3
WAIT_S = 600.0


def prompt(number: int, n_words: int = 200) -> str:
    """Like no other from its first words on."""
    return " ".join(f"{number * n_words + n:x}"[-3:] for n in range(n_words))


def post(url: str, path: str, **body: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = httpx.post(f"{url}{path}", json=body, timeout=WAIT_S)
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    return seconds, answer.json()


def main() -> None:
    model = Path(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    cold, prefills, warm = [], [], []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        place = Path(directory) / "shared"
        place.mkdir()
        a, b = (
            stack.enter_context(
                served(model, Path(directory) / home, KEEPWARM_REMOTE=place.as_uri())
            )
            for home in "ab"
        )
        post(b.url, "/v1/completions", prompt=prompt(99), max_tokens=1)  # kernels and rates
        for number in range(N_ROUNDS):
            seconds, said = post(b.url, "/v1/completions", prompt=prompt(2 * number), max_tokens=1)
            cold.append(seconds)
            there = prompt(2 * number + 1)
            seconds, told = post(a.url, "/v1/cache/prefill/completions", prompt=there)
            prefills.append(seconds)
            seconds, said = post(b.url, "/v1/completions", prompt=there, max_tokens=1)
            warm.append(seconds)
            names = "prompt_tokens", "computed", "shared"
            found = {name: told[name] for name in names} | said["keepwarm"]["reused"]
            times = f"{cold[-1]:.2f}, {prefills[-1]:.2f}, {warm[-1]:.2f} s"
            sys.stdout.write(f"cold, prefill elsewhere, first token then: {times}; {found}\n")
    medians = ", ".join(f"{median(each):.2f}" for each in (cold, prefills, warm))
    sys.stdout.write(f"medians: {medians} s\n")


if __name__ == "__main__":
    main()
