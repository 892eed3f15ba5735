"""What a day came to, from the results as they are kept: figures by kind of request, and goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from benchmarks.day.hosts import Hour, Noted
from benchmarks.day.script import RETURN, SUB_TURN, TURN
from keepwarm.units import format_bytes

Results: TypeAlias = Mapping[str, Any]

OURS, THEIRS = "keepwarm", "mlx-lm"
ORDINARY = {TURN, RETURN, SUB_TURN}
RECOMPUTED, BEYOND, WAITING, RESTARTED, WRITTEN, FLAT = 1.05, 64, 0.35, 1.3, 1.2, 1.1


class Goal(NamedTuple):
    what: str
    found: str
    goal: str
    holds: bool | None  # None: it was not measured


class OfKind(NamedTuple):
    """The requests of one kind to one server."""

    kind: str
    n: int
    p50_s: float
    p95_s: float
    n_new: int
    n_computed: int


def requests_of(results: Results, name: str) -> list[Noted]:
    return [Noted(**each) for each in results["servers"][name]["requests"]]


def hours_of(results: Results, name: str) -> list[Hour]:
    return [Hour(**each) for each in results["servers"][name]["hours"]]


def by_kind(noted: Sequence[Noted]) -> list[OfKind]:
    kinds = dict.fromkeys(note.kind for note in noted)
    return [_of_kind(kind, [note for note in noted if note.kind == kind]) for kind in kinds]


def _of_kind(kind: str, noted: Sequence[Noted]) -> OfKind:
    seconds = [note.first_s for note in noted]
    answered = [note for note in noted if not note.error]
    new, computed = _sum_new(answered), sum(note.n_computed for note in answered)
    return OfKind(kind, len(noted), rank(seconds, 50), rank(seconds, 95), new, computed)


def rank(values: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent of all do not exceed."""
    return sorted(values)[max(1, -(-percent * len(values) // 100)) - 1]


def _sum_new(noted: Sequence[Noted]) -> int:
    return sum(note.n_new for note in noted)


def waiting_s(noted: Sequence[Noted]) -> float:
    """Seconds to the first token, of all requests together."""
    return sum(note.first_s for note in noted)


def recomputed(noted: Sequence[Noted]) -> float:
    """Prompt tokens computed ÷ those that no request before began with."""
    answered = [note for note in noted if not note.error]
    return sum(note.n_computed for note in answered) / max(1, _sum_new(answered))


def goals(results: Results) -> list[Goal]:
    noted = requests_of(results, OURS)
    n_errors = sum(bool(note.error) for note in noted)
    return [
        _at_most("prompt tokens computed ÷ new, whole day", recomputed(noted), RECOMPUTED),
        _beyond(noted),
        _waiting(results),
        _restarted(noted),
        _written(results, noted),
        _flat(hours_of(results, OURS)),
        Goal("errors", str(n_errors), "0", n_errors == 0),
        _cold(results["cold"]),
    ]


def _at_most(what: str, found: float | None, limit: float, notes: str = "") -> Goal:
    if found is None:
        return Goal(what, "", f"≤ {limit:g}", None)
    return Goal(what, f"{found:.3g}{notes}", f"≤ {limit:g}", found <= limit)


def _beyond(noted: Sequence[Noted]) -> Goal:
    found = [note for note in noted if note.kind in ORDINARY and not note.error]
    most = max((note.n_beyond for note in found), default=0)
    above = sum(note.n_beyond > BEYOND for note in found)
    notes = f" ({above} of {len(found)} turns above)" if above else ""
    what = "most tokens computed beyond new on an ordinary turn"
    return Goal(what, f"{most:,}{notes}", f"≤ {BEYOND}", most <= BEYOND)


def _waiting(results: Results) -> Goal:
    what = "total waiting ÷ mlx_lm.server's"
    if THEIRS not in results["servers"]:
        return _at_most(what, None, WAITING)
    ours, theirs = (waiting_s(requests_of(results, name)) for name in (OURS, THEIRS))
    return _at_most(what, ours / theirs, WAITING, f" ({ours:.1f} s, {theirs:.1f} s)")


def _restarted(noted: Sequence[Noted]) -> Goal:
    ratios = [note.first_s / note.again_s for note in noted if note.again_s and not note.error]
    what = "first token after a restart or kill ÷ the same turn without, highest"
    return _at_most(what, max(ratios, default=None), RESTARTED, f" (of {len(ratios)})")


def _written(results: Results, noted: Sequence[Noted]) -> Goal:
    per_token, n_bytes = results["kv_bytes_per_token"], written_bytes(results, OURS)
    n_tokens = _sum_new(noted) + sum(note.n_answer for note in noted)
    found = n_bytes / (per_token * n_tokens) if per_token else None
    notes = f" ({format_bytes(n_bytes)})"
    return _at_most("bytes written ÷ KV of new tokens", found, WRITTEN, notes)


def written_bytes(results: Results, name: str) -> int:
    """As the system counts or the server, whichever is more."""
    server = results["servers"][name]
    return max(int(server["written_bytes"]), int(server["reported_bytes"]))


def _flat(hours: Sequence[Hour]) -> Goal:
    """Without keys and values, for which there are budgets."""
    first, *later = (hour.resident_bytes - hour.cached_bytes for hour in hours)
    found = max(later) / first if later else None
    return _at_most("memory beside keys and values, most ÷ after the first hour", found, FLAT)


def _cold(compared: Sequence[Mapping[str, Any]]) -> Goal:
    verdicts = [each["verdict"] for each in compared]
    n_ties = verdicts.count("tie")
    n_differ = len(verdicts) - n_ties - verdicts.count("same")
    what = "answers that differ from a cold run"
    if not verdicts:
        return Goal(what, "", "0", None)
    found = f"{n_differ} of {len(verdicts)} compared, {n_ties} up to a tie"
    return Goal(what, found, "0", n_differ == 0)
