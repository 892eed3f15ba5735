"""The verbs of `keepwarm cache` that change one agent, and what all its verbs share."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from keepwarm import config
from keepwarm.errors import BadInput
from keepwarm.progress import shown
from keepwarm.units import format_bytes, parse_bytes, printable

if TYPE_CHECKING:
    from keepwarm.agents.agent import Agent
    from keepwarm.agents.agent_store import AgentStore

app = typer.Typer()

WORDS = {
    "n_bytes": "size",
    "max_bytes": "limit",
    "newer": "newer format",
    "bad": "damaged",
    "shared_unreached": "not reached, will be cleared by a server",
}

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AgentId: TypeAlias = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")]
BranchNumber: TypeAlias = Annotated[
    int | None, typer.Option("--branch", help="Number of a branch, instead of the head.")
]


def open_store() -> AgentStore:
    from keepwarm.agents.agent_store import AgentStore, handshake_with
    from keepwarm.store.disk.disk import DiskLimits

    settings = config.load()
    limits, per_day = DiskLimits(settings.disk_bytes), settings.disk_writes_per_day or None
    return AgentStore(
        settings.store,
        limits,
        per_day,
        settings.read_secret("encryption_key"),
        settings.retention_s or None,
        handshake=handshake_with(settings),
    )


def delete_shared(store: AgentStore) -> dict[str, list[str]]:
    """Delete from shared tiers what was deleted here; which of them could not be reached."""
    if not store.tombstones.places():
        return {}
    from keepwarm.remote.deleter import RemoteDeleter, erase_at_once
    from keepwarm.remote.opening import compute_class

    settings = config.load()
    password = settings.read_secret("remote_password")
    erase = erase_at_once(password, store.disk.cipher, compute_class(settings.home))
    unreached = RemoteDeleter(store.tombstones, store.blocks_of_agents, erase).finish()
    return {"shared_unreached": unreached} if unreached else {}


@app.command()
def show(agent: AgentId, branch: BranchNumber = None, as_json: AsJson = False) -> None:
    """Show one agent.

    Its model, turns, branches, size, dates, pin, quota and retention.
    """
    with open_store() as store:
        found = store.find(agent, branch=branch)
        print_agent(store, found, as_json, n_bytes=n_bytes_of(store, found))


@app.command("set")
def set_(
    agent: AgentId,
    *,
    pin: Annotated[
        bool | None,
        typer.Option("--pin/--unpin", help="Protect its head, or --branch, from eviction."),
    ] = None,
    branch: BranchNumber = None,
    quota: Annotated[
        str | None,
        typer.Option(
            "--quota", metavar="SIZE", help="Bytes that others cannot evict, such as 2G; 0: none."
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="Set a label; KEY= removes it."),
    ] = None,
    note: Annotated[str | None, typer.Option("--note", help="Set the label `note`.")] = None,
    retention: Annotated[
        float | None,
        typer.Option(
            "--retention", help="Delete it after this many seconds without use; 0: never."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change an agent's pin, quota, labels, note or retention."""
    labels = dict(_label(text) for text in label or ()) | ({} if note is None else {"note": note})
    changes: dict[str, Any] = {}
    if retention is not None:
        changes["retention_s"] = _checked_retention(retention) or None
    if quota is not None:
        changes["quota_bytes"] = _size(quota) or None
    if branch is not None and pin is None:
        raise BadInput("--branch names what is pinned; use it with --pin or --unpin.")
    if pin is not None and branch is None:
        changes["pinned"] = pin
    with open_store() as store:
        if labels:
            metadata = {**store.agents.show(agent).metadata, **labels}
            changes["metadata"] = {key: value for key, value in metadata.items() if value}
        changed = store.agents.update(agent, **changes)
        if pin is not None and branch is not None:
            changed = store.agents.pin(agent, pin, branch)
        print_agent(store, changed, as_json)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise BadInput(f"{text!r} is not a size; write it as 2G, 500MB or in bytes.") from error


def _checked_retention(seconds: float) -> float:
    least, most = config.RANGES["retention_s"]
    if not least <= seconds <= most:  # as if it is not a number
        raise BadInput(f"--retention is {seconds:g}; it is from {least:g} to {most:g} seconds.")
    return seconds


def _label(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise BadInput(f"--label is {text!r}; write it as KEY=VALUE.")
    return key, value


@app.command()
def fork(
    agent: AgentId,
    new: Annotated[list[str], typer.Argument(metavar="NEW", help="Ids of the new agents.")],
    branch: BranchNumber = None,
    count: Annotated[
        int, typer.Option("--count", min=1, max=1000, help="Copies of each: NEW-1, NEW-2, …")
    ] = 1,
    *,
    as_json: AsJson = False,
) -> None:
    """Create agents with the same history; no block is copied."""
    if count > 1:
        new = [f"{name}-{number}" for name in new for number in range(1, count + 1)]
    with open_store() as store:
        made = store.agents.fork_all(agent, new, branch)
        if as_json:
            fields = [agent_fields(store, each) for each in made]
            print(json.dumps(fields[0] if len(fields) == 1 else fields))
            return
        for each in made:
            print_agent(store, each, as_json)


@app.command()
def rewind(
    agent: AgentId,
    turn: Annotated[int, typer.Argument(help="Last turn to keep; 0 drops all.")],
    branch: BranchNumber = None,
    as_json: AsJson = False,
) -> None:
    """Drop an agent's turns after this one.

    With --branch, that branch becomes the head.
    """
    with open_store() as store:
        print_agent(store, store.agents.rewind(agent, turn, branch), as_json)


@app.command("rm")
def remove(agent: AgentId, as_json: AsJson = False) -> None:
    """Delete an agent.

    Every block that no other agent uses is deleted with it, from shared tiers too. Unreachable
    tiers are reported and cleared later.
    """
    with open_store() as store, shown("deleting") as line:
        n_blocks = store.agents.delete(agent, line.count)
        shared = delete_shared(store)
    print_fields({"agent": agent, "removed_blocks": n_blocks} | shared, as_json)


def agent_fields(store: AgentStore, agent: Agent) -> dict[str, Any]:
    """An agent as JSON, without what is secret in an encrypted store."""
    fields: dict[str, Any] = json.loads(agent.to_json())
    for branch in fields["branches"]:
        del branch["namespace"]
    head = {"model": agent.head.model, "n_tokens": agent.n_tokens, "turns": agent.turns}
    return fields | head | {"imported": bool(store.origin_of(agent))}


def n_bytes_of(store: AgentStore, agent: Agent) -> int:
    """Bytes of its stored blocks, shared ones included."""
    return sum(known.n_bytes for known in store.disk.have(agent.blocks).values())


def print_fields(fields: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(fields))
        return
    for name, value in fields.items():
        print(f"{_in_words(name)}: {_readable(name, value)}")


def _in_words(name: str) -> str:
    """The name of a field as people read it."""
    return WORDS.get(name) or name.removesuffix("_bytes").replace("_", " ")


def _readable(name: str, value: Any) -> str:
    """A value as people read it; `--json` has it as it is."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_readable(name, each)}" for key, each in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "not yet" if name.startswith("hit_rate") else "none"
    if name.endswith("bytes") or name == "written_by_day":
        return format_bytes(value)
    if name.startswith("hit_rate"):
        return f"{100 * value:.1f} %"
    if name == "shared_unreached":
        value = ", ".join(value)
    return str(len(value)) if isinstance(value, list | tuple) else str(value)


def print_agent(store: AgentStore, agent: Agent, as_json: bool, **more: Any) -> None:
    """One agent: its record as JSON, or with names, dates and sizes."""
    if as_json:
        print(json.dumps(agent_fields(store, agent) | more))
        return
    for name, value in _shown(store, agent).items():
        print(f"{name}: {printable(str(value))}")
    if len(agent.branches) > 1:
        for branch in agent.branches:
            turns = f"{len(branch.turns)} turns, {branch.n_tokens} tokens"
            print(f"branch {branch.number}: {turns}, used {format_date(branch.used)}")


def _shown(store: AgentStore, agent: Agent) -> dict[str, str | int]:
    labels = ", ".join(f"{key}={value}" for key, value in agent.metadata.items())
    unused = agent.retention_s and f"deleted when unused for {agent.retention_s / 86400:g} days"
    return {
        "agent": agent.id,
        "title": agent.title or "none",
        "model": agent.head.model or "unknown",
        "turns": len(agent.turns),
        "tokens": agent.n_tokens,
        "size": format_bytes(n_bytes_of(store, agent)),
        "created": format_date(agent.created) if agent.created else "unknown",
        "used": format_date(agent.used) if agent.used else "unknown",
        "pinned": "yes" if agent.pinned else "no",
        "quota": format_bytes(agent.quota_bytes) if agent.quota_bytes else "none",
        "retention": unused or "kept until evicted or deleted",
        "forked from": agent.forked_from or "none",
        "imported": "yes" if store.origin_of(agent) else "no",
        "labels": labels or "none",
    }


def format_date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
