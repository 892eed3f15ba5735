"""The results as the page `docs/results/coders.md` and the tables of `docs/results/clients.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
JOURNEYS, SESSIONS = (
    re.compile(
        rf"(?<=<!-- measured, from docs/results/{name}.json -->\n).*?(?=<!-- end -->)", re.DOTALL
    )
    for name in ("journeys", "sessions")
)
NAMES = {
    "claude": "Claude Code",
    "codex": "Codex",
    "opencode": "opencode",
    "qwen": "Qwen Code",
    "continue": "Continue",
    "pi": "pi",
    "aider": "aider",
}
HEADS = ("step", "prompt tokens", "new", "computed", "reused from", "head", "turns", "branches")
LINES = ("---", *("--:",) * 3, "---", *("--:",) * 3)

# Clients that end at an overflow, whatever the server says, by the sections that say why.
ENDS = {name: f"[ends](../clients.md#{name})" for name in ("codex", "continue", "aider")}

# Steps of a journey, by the heads of their columns.
JOURNEY = {
    "turn 2": "turn 2",
    "resumed": "resumed",
    "restarted": "after a restart",
    "same": "new session, same project",
    "other": "new session, other project",
}

# Steps of new sessions, likewise.
SESSION = {
    "same": "same project",
    "other": "other project",
    "second subagent": "second subagent",
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


def clients(text: str, journeys: dict[str, Any], sessions: dict[str, Any]) -> str:
    """The page of clients with its tables."""
    text = JOURNEYS.sub(lambda _: journeys_table(journeys["clients"]), text)
    return SESSIONS.sub(lambda _: sessions_table(sessions["clients"]), text)


def sessions_table(clients: dict[str, Any]) -> str:
    """What new sessions compute, in the client's order and by default."""
    heads = ["client", "version", "template"]
    heads += [f"{step}, {when}" for step in SESSION.values() for when in ("as sent", "default")]
    rows = [
        [NAMES[client["name"]], client["version"], kind]
        + [_share(costs.get(step)) for step in SESSION for costs in settings.values()]
        for client in clients.values()
        for kind, settings in client["kinds"].items()
    ]
    lines = [heads, ["---"] * 3 + ["--:"] * 2 * len(SESSION), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def journeys_table(clients: dict[str, Any]) -> str:
    """What every client computes anew, by the kind of template."""
    heads = ["client", "version", "template", *JOURNEY.values(), "after overflow"]
    rows = [
        [NAMES[name], client["version"], kind]
        + [f"{steps[step]['computed']:,} of {steps[step]['prompt']:,}" for step in JOURNEY]
        + [_after(name, steps)]
        for name, client in clients.items()
        for kind, steps in client["kinds"].items()
    ]
    lines = [heads, ["---"] * 3 + ["--:"] * (len(JOURNEY) + 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _after(name: str, steps: dict[str, Any]) -> str:
    """Of the question that did not fit; where the client ends, of the next, and if it is told."""
    if goes_on(steps["overflow"]):
        return _last(steps["overflow"])
    further = {"next question": "next", "told": "told"}
    tried = [f"{name}: {_last(steps[key])}" for name, key in further.items() if key in steps]
    return "; ".join((ENDS.get(name, "ends"), *tried))


def goes_on(tried: dict[str, Any]) -> bool:
    """A question was answered, and the client said nothing of an error."""
    return bool(tried["asked"]) and not tried["said"]


def _last(tried: dict[str, Any]) -> str:
    """The last request of a question that was answered."""
    if not goes_on(tried):
        return "ends"
    last = tried["asked"][-1]
    return f"{last['computed']:,} of {last['prompt']:,}"


def _share(cost: dict[str, Any] | None) -> str:
    """Empty for a client that starts no subagents."""
    if cost is None:
        return ""
    share = cost["computed"] / cost["prompt"]
    return f"{cost['computed']:,} of {cost['prompt']:,} ({share:.1%})"


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
