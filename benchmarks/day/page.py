"""The results as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.day.figures import (
    Results,
    by_kind,
    goals,
    hours_of,
    recomputed,
    requests_of,
    waiting_s,
    written_bytes,
)
from keepwarm.units import format_bytes

GOALS = ("goal", "found", "wanted", "")
TOTALS = (
    *("server", "requests", "waiting, s", "computed ÷ new", "written", "starts, s", "errors"),
    "prompts counted otherwise",
)
KINDS = ("kind of request", "server", "n", "p50, s", "p95, s", "new tokens", "computed")
HOURS = (
    "hour",
    "server",
    "resident",
    "of it KV",
    "buffers",
    "threads",
    "descriptors",
    "store",
    "evicted",
)
VERDICTS = {True: "holds", False: "**does not hold**", None: "not measured"}


def tables(results: Results) -> str:
    """Conditions, goals, totals, first tokens by kind, and the hours of every server."""
    return "\n\n".join(_parts(results)) + "\n"


def _parts(results: Results) -> Iterator[str]:
    yield _conditions(results)
    rows = [(each.what, each.found, each.goal, VERDICTS[each.holds]) for each in goals(results)]
    yield _table(GOALS, rows)
    yield _table(TOTALS, [_total(results, name) for name in results["servers"]])
    yield _table(KINDS, _kinds(results))
    yield _table(HOURS, _hours(results))
    yield from _errors(results)


def _conditions(results: Results) -> str:
    machine = results["machine"]
    return (
        f"`{results['command']}`, {results['date']}: {results['model']}, lengths ÷ "
        f"{results['scale']}, {results['turns']} turns, {results['images']} images mentioned; "
        f"{machine['backend']} on {machine['n_cpus']} cores of {machine['architecture']}, load "
        f"{machine['load'][0]:g} at the start; {results['seconds']:,} s in all. A tie is a gap "
        f"below {results['tie']:g} between two logprobs."
    )


def _total(results: Results, name: str) -> tuple[str, ...]:
    records = requests_of(results, name)
    starts = ", ".join(f"{seconds:.1f}" for seconds in results["servers"][name]["starts_s"])
    n_errors = sum(bool(record.error) for record in records)
    n_otherwise = sum(record.n_counted != record.n_prompt for record in records if not record.error)
    return (
        name,
        str(len(records)),
        f"{waiting_s(records):.1f}",
        f"{recomputed(records):.2f}",
        format_bytes(written_bytes(results, name)),
        starts,
        str(n_errors),
        str(n_otherwise),
    )


def _kinds(results: Results) -> Iterator[Sequence[str]]:
    found = {
        name: {each.kind: each for each in by_kind(requests_of(results, name))}
        for name in results["servers"]
    }
    for kind in dict.fromkeys(kind for kinds in found.values() for kind in kinds):
        for name, kinds in found.items():
            if kind not in kinds:
                continue
            each = kinds[kind]
            times = ["" if s is None else f"{s:.3f}" for s in (each.p50_s, each.p95_s)]
            yield kind, name, str(each.n), *times, f"{each.n_new:,}", f"{each.n_computed:,}"


def _hours(results: Results) -> Iterator[Sequence[str]]:
    of_all = {name: hours_of(results, name) for name in results["servers"]}
    for name, hours in of_all.items():
        for hour in hours:
            sizes = [
                format_bytes(n) for n in (hour.resident_bytes, hour.cached_bytes, hour.buffer_bytes)
            ]
            counts = [str(hour.n_threads), str(hour.n_descriptors)]
            stored = format_bytes(hour.stored_bytes) if hour.stored_bytes else ""
            evicted = str(hour.n_evicted) if hour.stored_bytes else ""
            yield f"{hour.hour}:00", name, *sizes, *counts, stored, evicted


def _errors(results: Results) -> Iterator[str]:
    lines = [
        f"- {name}, {record.kind}: {record.error}"
        for name in results["servers"]
        for record in requests_of(results, name)
        if record.error
    ]
    servers = results["servers"].items()
    lines += [f"- {name}: {server['failure']}" for name, server in servers if server["failure"]]
    if lines:
        yield "Errors:"
        yield "\n".join(lines)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
