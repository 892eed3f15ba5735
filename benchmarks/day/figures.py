"""What a day came to, from the results as they are kept: figures by kind of request, and goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from benchmarks.day.hosts import CUT, HourSample, RequestRecord
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


class KindFigures(NamedTuple):
    """The requests of one kind to one server."""

    kind: str
    n: int
    p50_s: float | None  # None: none was answered
    p95_s: float | None
    n_new: int
    n_computed: int


def requests_of(results: Results, name: str) -> list[RequestRecord]:
    return [RequestRecord(**each) for each in results["servers"][name]["requests"]]


def hours_of(results: Results, name: str) -> list[HourSample]:
    return [HourSample(**each) for each in results["servers"][name]["hours"]]


def by_kind(records: Sequence[RequestRecord]) -> list[KindFigures]:
    kinds = dict.fromkeys(record.kind for record in records)
    return [
        _kind_figures(kind, [record for record in records if record.kind == kind]) for kind in kinds
    ]


def _kind_figures(kind: str, records: Sequence[RequestRecord]) -> KindFigures:
    answered = _answered(records)
    seconds = [record.first_s for record in answered]
    p50_s, p95_s = (percentile(seconds, percent) if seconds else None for percent in (50, 95))
    new, computed = _sum_new(answered), _sum_computed(answered)
    return KindFigures(kind, len(records), p50_s, p95_s, new, computed)


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent of all do not exceed."""
    return sorted(values)[max(1, -(-percent * len(values) // 100)) - 1]


def _answered(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if not record.error]


def _sum_computed(records: Sequence[RequestRecord]) -> int:
    return sum(record.n_computed for record in records)


def _sum_new(records: Sequence[RequestRecord]) -> int:
    return sum(record.n_new for record in records)


def waiting_s(records: Sequence[RequestRecord]) -> float:
    """Seconds to the first token, of all requests that were answered."""
    return sum(record.first_s for record in _answered(records))


def recomputed(records: Sequence[RequestRecord]) -> float:
    """Prompt tokens computed ÷ those that no request before began with."""
    answered = _answered(records)
    return _sum_computed(answered) / max(1, _sum_new(answered))


def goals(results: Results) -> list[Goal]:
    records = requests_of(results, OURS)
    failed = bool(results["servers"][OURS]["failure"])
    answered = _answered(records)
    n_errors = len(records) - len(answered) + failed
    share = recomputed(records) if records else None
    return [
        _at_most("prompt tokens computed ÷ new, whole day", share, RECOMPUTED),
        _beyond(answered),
        _waiting(results),
        _restarted(answered),
        _written(results, answered),
        _flat(results),
        Goal("errors", str(n_errors), "0", n_errors == 0),
        _cold(results["cold"]),
    ]


def _at_most(what: str, found: float | None, limit: float, notes: str = "") -> Goal:
    if found is None:
        return Goal(what, "", f"≤ {limit:g}", None)
    return Goal(what, f"{found:.3g}{notes}", f"≤ {limit:g}", found <= limit)


def _beyond(records: Sequence[RequestRecord]) -> Goal:
    found = [record for record in records if record.kind in ORDINARY]
    most = max((record.n_beyond for record in found), default=0)
    above = sum(record.n_beyond > BEYOND for record in found)
    notes = f" ({above} of {len(found)} turns above)" if above else ""
    what = "most tokens computed beyond new on an ordinary turn"
    holds = most <= BEYOND if found else None
    return Goal(what, f"{most:,}{notes}" if found else "", f"≤ {BEYOND}", holds)


def _waiting(results: Results) -> Goal:
    what = "total waiting ÷ mlx_lm.server's"
    all_ours = requests_of(results, OURS)
    others = requests_of(results, THEIRS) if THEIRS in results["servers"] else []
    both = zip(all_ours, others, strict=False)
    pairs = [pair for pair in both if len(_answered(pair)) == len(pair)]
    if not pairs:
        return _at_most(what, None, WAITING)
    ours, theirs = (waiting_s(side) for side in zip(*pairs, strict=True))
    notes = f", {len(pairs)} of {len(all_ours)} requests" if len(pairs) < len(all_ours) else ""
    return _at_most(what, ours / theirs, WAITING, f" ({ours:.1f} s, {theirs:.1f} s{notes})")


def _restarted(records: Sequence[RequestRecord]) -> Goal:
    ratios = [record.first_s / record.repeat_s for record in records if record.repeat_s]
    what = "first token after a restart or kill ÷ the same turn without, highest"
    above = sum(ratio > RESTARTED for ratio in ratios)
    notes = f" ({above} of {len(ratios)} above)"
    return _at_most(what, max(ratios, default=None), RESTARTED, notes)


def _written(results: Results, records: Sequence[RequestRecord]) -> Goal:
    per_token, n_bytes = results["kv_bytes_per_token"], written_bytes(results, OURS)
    n_tokens = _sum_computed(records) + sum(record.n_answer for record in records)
    ours = results["servers"][OURS]
    found = None
    if per_token and n_tokens and CUT not in ours["events"]:
        found = n_bytes / (per_token * n_tokens)
    lost = f", {n:,} saves lost" if (n := ours.get("lost_saves")) else ""
    notes = f" ({format_bytes(n_bytes)}{lost})"
    return _at_most("bytes written ÷ KV of computed tokens", found, WRITTEN, notes)


def written_bytes(results: Results, name: str) -> int:
    """As the system counts or the server, whichever is more."""
    server = results["servers"][name]
    return max(int(server["written_bytes"]), int(server["reported_bytes"]))


def _flat(results: Results) -> Goal:
    """Without what has budgets: keys and values, and MLX's freed buffers."""
    what = "memory beside what has budgets, most ÷ after the first hour"
    if results["machine"]["backend"] == "cuda":  # there these are in no process's memory
        return Goal(what, "what has budgets is on the GPU", f"≤ {FLAT:g}", None)
    hours = hours_of(results, OURS)
    beside = [hour.resident_bytes - hour.cached_bytes - hour.buffer_bytes for hour in hours]
    found = max(beside[1:]) / beside[0] if len(beside) > 1 else None
    return _at_most(what, found, FLAT)


def _cold(compared: Sequence[Mapping[str, Any]]) -> Goal:
    verdicts = [each["verdict"] for each in compared]
    n_ties = verdicts.count("tie")
    n_differ = len(verdicts) - n_ties - verdicts.count("same")
    what = "answers that differ from a cold run"
    if not verdicts:
        return Goal(what, "", "0", None)
    found = f"{n_differ} of {len(verdicts)} compared, {n_ties} up to a tie"
    return Goal(what, found, "0", n_differ == 0)
