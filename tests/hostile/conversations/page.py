"""The report as a page: `docs/results/conversations.md`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.kit.models import ARCHITECTURES

PAGE = Path(__file__).with_suffix(".md")
EVENTS = ("restarts", "crashes", "agents", "notes", "index lost", "index spoiled")
DAMAGED = ("records flipped", "records spoiled", "records swapped", "records lost")
REUSED = ("live", "memory", "disk", "computed")


def page(results: dict[str, Any]) -> str:
    reports, machine = results["architectures"], results["machine"]
    requests, answers, store, events, reused = (
        _sum(reports, name) for name in ("requests", "answers", "store", "events", "reused")
    )
    counted = {name: answers[name] for name in ("equal", "drifted", "cancelled", "different")}
    counted |= {name.replace(" ", "_"): events[name] for name in (*EVENTS, *DAMAGED)}
    counted |= {name: reused[name] for name in REUSED}
    counted |= {"requests": sum(requests.values()), "quarantined": store["quarantined"]}
    counted |= {"evicted": store["evicted"] + store["refused"], "seconds": results["seconds"]}
    return PAGE.read_text().format(
        command=results["command"],
        date=results["date"],
        machine=f"{machine['n_cpus']} cores of {machine['architecture']}",
        n_architectures=len(reports),
        n_kit=len(ARCHITECTURES),
        rows="".join(_row(name, report) for name, report in reports.items()),
        **{name: f"{count:,}" for name, count in counted.items()},
    )


def _sum(reports: dict[str, Any], name: str) -> Counter[str]:
    return sum((Counter(report[name]) for report in reports.values()), Counter())


def _row(name: str, report: dict[str, Any]) -> str:
    answers, reused = Counter(report["answers"]), Counter(report["reused"])
    n_asked, n_reused = sum(report["requests"].values()), sum(reused.values()) - reused["computed"]
    ended = [answers[name] for name in ("equal", "drifted", "cancelled", "different")]
    cells = [f"{count:,}" for count in (n_asked, *ended, n_reused, reused["computed"])]
    return f"| `{name}` | {' | '.join(cells)} |\n"
