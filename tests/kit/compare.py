"""The definition of "the same as a cold run".

With equal slices and padding the logits are bit-identical. Otherwise sums may be computed in
another order: then |Δlogprob| ≤ 1e-4 in fp32, and greedy tokens are equal up to the first
step at which the cold run's two best tokens are closer than 1e-3, where either may be picked.
"""

from typing import NamedTuple

import mlx.core as mx

from tests.kit.runs import Run

TOLERANCE = 1e-4
TIE = 1e-3
APART = 1e-2


class Agreement(NamedTuple):
    """How far two runs were compared: whole steps, where a tie ended it, the largest Δlogprob."""

    n_steps: int
    tie: int | None
    max_difference: float


def gaps(run: Run) -> list[float]:
    """At each step, how far the best token lies above the second."""
    best = mx.sort(run.logprobs, axis=-1)[:, -2:]
    return (best[:, 1] - best[:, 0]).tolist()  # type: ignore[return-value]


def differences(a: Run, b: Run) -> list[float]:
    """At each step, the largest |Δlogprob| over the vocabulary; NaN if either run has one."""
    return mx.abs(a.logprobs - b.logprobs).max(axis=-1).tolist()  # type: ignore[return-value]


def assert_same(cold: Run, other: Run, *, bitwise: bool = False, noise: float = 0.0) -> Agreement:
    """Fail unless `other` equals the cold run as defined above; return how much was compared.

    `noise` is how far this machine's BLAS alone moves a logprob; twice that is allowed.
    """
    _check_shapes(cold, other)
    n = len(cold.tokens)
    tie = None if bitwise else next((i for i, g in enumerate(gaps(cold)) if g < TIE), None)
    n_steps = n if tie is None else tie
    allowed = 0.0 if bitwise else max(TOLERANCE, 2 * noise)
    # The step of a tie was fed the same tokens, so its distribution still counts.
    apart = differences(cold, other)[: n_steps + 1]
    for step, difference in enumerate(apart):
        # Written so that NaN fails too.
        if not difference <= allowed:
            raise AssertionError(
                f"step {step} of {n}: |Δlogprob| is {difference:.3g}, allowed {allowed:g}; "
                f"cold picked {cold.tokens[step]}, the other {other.tokens[step]}"
            )
    if cold.tokens[:n_steps] != other.tokens[:n_steps]:
        raise AssertionError(f"tokens differ within {n_steps} steps: {cold.tokens} {other.tokens}")
    return Agreement(n_steps, tie, max(apart))


def assert_differs(cold: Run, other: Run) -> None:
    """Fail unless `other` clearly differs from its first step on: for controls."""
    _check_shapes(cold, other)
    (first, *_) = differences(cold, other)
    if not first > APART:
        raise AssertionError(
            f"a control must differ: |Δlogprob| at step 0 is {first:.3g}, not above {APART:g}"
        )


def _check_shapes(a: Run, b: Run) -> None:
    if a.logprobs.shape != b.logprobs.shape or len(a.tokens) != len(b.tokens):
        raise AssertionError(f"lengths differ: {a.logprobs.shape} and {b.logprobs.shape}")
    if not len(a.tokens):
        raise AssertionError("nothing to compare: both runs are empty")
    if {a.logprobs.dtype, b.logprobs.dtype} != {mx.float32}:
        raise AssertionError(f"fp32 expected: {a.logprobs.dtype} and {b.logprobs.dtype}")
