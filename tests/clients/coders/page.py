"""The results as a page: `docs/results/coders.md`, and the table of `docs/clients.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
BETWEEN, SESSIONS = (
    re.compile(
        rf"(?<=<!-- measured, from docs/results/{name}.json -->\n).*?(?=<!-- end -->)", re.DOTALL
    )
    for name in ("coders", "sessions")
)
NAMES = {
    "claude": "Claude Code",
    "codex": "Codex",
    "opencode": "opencode",
    "qwen": "Qwen Code",
}
HEADS = ("step", "prompt tokens", "new", "computed", "reused from", "head", "turns", "branches")
LINES = ("---", *("--:",) * 3, "---", *("--:",) * 3)

# Of the table in `docs/clients.md`: a step, and which of its requests.
SHOWN = {
    "first request": ("first question", 0),
    "result of its tool": ("first question", -1),
    "second question": ("second question", -1),
    "after `kill -9`": ("question after `kill -9`", -1),
    "new session, same project": ("new session, same project", 0),
    "new session, other project": ("new session, other project", 0),
}


def page(results: dict[str, Any]) -> str:
    machine = results["machine"]
    return PAGE.read_text().format(
        command=results["command"],
        date=results["date"],
        machine=f"{machine['n_cpus']} cores of {machine['architecture']}",
        **{
            name: f"{NAMES[name]} {client['version']}\n\n{table(client['steps'])}"
            for name, client in results["clients"].items()
        },
    )


def clients(text: str, results: dict[str, Any], sessions: dict[str, Any]) -> str:
    """The page of clients with its tables."""
    text = BETWEEN.sub(lambda _: _summary(results["clients"]), text)
    return SESSIONS.sub(lambda _: sessions_table(sessions["clients"]), text)


def sessions_table(clients: dict[str, Any]) -> str:
    """What new sessions compute, before and now."""
    steps = {"same": "same project", "other": "other project"}
    heads = ["client", "version", "template"]
    heads += [f"{step}, {when}" for step in steps.values() for when in ("before", "now")]
    rows = [
        [NAMES[name], client["version"], kind]
        + [_share(costs[step]) for step in steps for costs in settings.values()]
        for name, client in clients.items()
        for kind, settings in client["kinds"].items()
    ]
    lines = [heads, ["---"] * 3 + ["--:"] * 4, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _share(cost: dict[str, Any]) -> str:
    share = cost["computed"] / cost["prompt"]
    return f"{cost['computed']:,} of {cost['prompt']:,} ({share:.1%})"


def _summary(found: dict[str, Any]) -> str:
    heads = ("client", "version", *SHOWN)
    rows = [(NAMES[name], each["version"], *_shown(each["steps"])) for name, each in found.items()]
    lines = (heads, ("---",) * len(heads), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(steps: Sequence[dict[str, Any]]) -> Iterator[str]:
    by_name = {step["name"]: step for step in steps}
    for name, number in SHOWN.values():
        main = [each["asked"] for each in by_name[name]["costs"] if not each["is_side"]]
        yield f"{main[number]['computed']:,} of {main[number]['prompt']:,}"


def table(steps: Sequence[dict[str, Any]]) -> str:
    """One row for every request, and for every step without one."""
    rows = [row for step in steps for row in _rows(step)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (HEADS, LINES, *rows))


def _rows(step: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    agent = (_head(step), str(step["turns"]), str(step["branches"]))
    costs = [_cost(cost) for cost in step["costs"]] or [("",) * 4]
    for number, cost in enumerate(costs):
        is_last = number == len(costs) - 1
        yield ("" if number else step["name"], *cost, *(agent if is_last else ("",) * 3))


def _head(step: dict[str, Any]) -> str:
    wrong = f"**{step['head']:,}**, not {step['expected']:,}"
    return f"{step['head']:,}" if step["keeps_head"] else wrong


def _cost(cost: dict[str, Any]) -> tuple[str, ...]:
    asked, new = cost["asked"], cost["n_new"]
    reused = ", ".join(f"{tier} {n:,}" for tier, n in asked["reused"].items())
    new = "side" if cost["is_side"] else "" if new is None else f"{new:,}"
    return f"{asked['prompt']:,}", new, f"{asked['computed']:,}", reused
