"""The verbs of `keepwarm cache` that change one agent, and what all its verbs share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich import progress as bars
from rich.console import Console

from keepwarm import config
from keepwarm.errors import BadInput

if TYPE_CHECKING:
    from keepwarm.cache.agents.agent import Agent
    from keepwarm.cache.disk_store import DiskStore
    from keepwarm.store.disk.upkeep import Progress

app = typer.Typer()

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AgentId: TypeAlias = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")]
AnyId: TypeAlias = Annotated[
    str, typer.Argument(metavar="AGENT", help="Agent id, or prefix id (@ and digits).")
]
BranchNumber: TypeAlias = Annotated[
    int | None, typer.Option("--branch", help="One of its branches, in place of the head.")
]


def open_store() -> DiskStore:
    from keepwarm.cache.disk_store import DiskStore
    from keepwarm.store.disk.disk import DiskLimits

    settings = config.load()
    limits, per_day = DiskLimits(settings.disk_bytes), settings.disk_writes_per_day or None
    return DiskStore(
        settings.store,
        limits,
        per_day,
        settings.read_encryption_key(),
        settings.retention_s or None,
    )


@contextmanager
def bar(label: str) -> Iterator[Progress]:
    """A progress bar on stderr, if that is a terminal."""
    hidden = not sys.stderr.isatty()
    with bars.Progress(console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@app.command()
def show(agent: AnyId, branch: BranchNumber = None, as_json: AsJson = False) -> None:
    """Show one agent, or a prefix: turns, branches, size, pin, quota, retention."""
    with open_store() as store:
        found = store.find(agent, branch=branch)
        print_fields(agent_fields(store, found) | {"n_bytes": n_bytes_of(store, found)}, as_json)


@app.command()
def pin(agent: AnyId, branch: BranchNumber = None, as_json: AsJson = False) -> None:
    """Protect the blocks of an agent's head, or of a prefix, from eviction."""
    _pin(agent, True, branch, as_json)


@app.command()
def unpin(agent: AnyId, branch: BranchNumber = None, as_json: AsJson = False) -> None:
    """Allow the blocks of an agent or a prefix to be evicted."""
    _pin(agent, False, branch, as_json)


def _pin(name: str, pinned: bool, branch: int | None, as_json: bool) -> None:
    with open_store() as store:
        if _is_prefix(name):
            store.prefixes.pin(name, pinned)
            print_fields({"prefix": name, "pinned": pinned}, as_json)
        else:
            print_fields(agent_fields(store, store.agents.pin(name, pinned, branch)), as_json)


def _is_prefix(name: str) -> bool:
    from keepwarm.cache.agents.prefixes import PREFIX_SIGN

    return name.startswith(PREFIX_SIGN)


@app.command("set")
def set_(
    agent: AgentId,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="Set a label; KEY= removes it."),
    ] = None,
    note: Annotated[str | None, typer.Option("--note", help="Set the label `note`.")] = None,
    retention: Annotated[
        float | None,
        typer.Option("--retention", help="Delete it when unused for so many seconds; 0: never."),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Change an agent's labels, note or retention."""
    labels = dict(_label(text) for text in label or ()) | ({} if note is None else {"note": note})
    changes = {} if retention is None else {"retention_s": retention or None}
    with open_store() as store:
        metadata = {**store.agents.show(agent).metadata, **labels}
        kept = {key: value for key, value in metadata.items() if value}
        changed = store.agents.update(agent, metadata=kept, **changes)
        print_fields(agent_fields(store, changed), as_json)


def _label(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise BadInput(f"--label is {text!r}; write it as KEY=VALUE.")
    return key, value


@app.command()
def quota(
    agent: AgentId,
    n_bytes: Annotated[int, typer.Argument(help="Bytes to reserve; 0 removes the quota.")],
    as_json: AsJson = False,
) -> None:
    """Reserve bytes for an agent that other agents cannot evict."""
    with open_store() as store:
        changed = store.agents.update(agent, quota_bytes=n_bytes or None)
        print_fields(agent_fields(store, changed), as_json)


@app.command()
def fork(
    agent: AgentId,
    new: Annotated[list[str], typer.Argument(metavar="NEW...", help="Ids of the new agents.")],
    branch: BranchNumber = None,
    count: Annotated[
        int, typer.Option("--count", min=1, max=1000, help="So many of each: NEW-1, NEW-2, …")
    ] = 1,
    *,
    as_json: AsJson = False,
) -> None:
    """Create agents with the same history; no block is copied."""
    if count > 1:
        new = [f"{name}-{number}" for name in new for number in range(1, count + 1)]
    with open_store() as store:
        made = [agent_fields(store, each) for each in store.agents.fork_all(agent, new, branch)]
    if as_json:
        print(json.dumps(made[0] if len(made) == 1 else made))
        return
    for fields in made:
        print_fields(fields, as_json)


@app.command()
def rewind(
    agent: AgentId,
    turn: Annotated[int, typer.Argument(help="Last turn to keep; 0 drops all.")],
    branch: BranchNumber = None,
    as_json: AsJson = False,
) -> None:
    """Drop an agent's turns after this one; a branch that is named becomes the head."""
    with open_store() as store:
        print_fields(agent_fields(store, store.agents.rewind(agent, turn, branch)), as_json)


@app.command("rm")
def remove(agent: AnyId, as_json: AsJson = False) -> None:
    """Delete an agent, or a prefix, and every block that no other agent uses."""
    with open_store() as store, bar("deleting") as progress:
        n_blocks = (store.prefixes if _is_prefix(agent) else store.agents).delete(agent, progress)
    print_fields({"agent": agent, "removed_blocks": n_blocks}, as_json)


@app.command()
def release(agent: AgentId, as_json: AsJson = False) -> None:
    """Vouch for an imported agent: its blocks then serve every prompt that begins alike."""
    with open_store() as store, bar("releasing") as progress:
        print_fields(agent_fields(store, store.release(agent, progress)), as_json)


def agent_fields(store: DiskStore, agent: Agent) -> dict[str, Any]:
    """An agent as JSON, without what is secret in an encrypted store."""
    fields: dict[str, Any] = json.loads(agent.to_json())
    for each in (fields, *fields["branches"]):
        del each["namespace"]
    return fields | {"imported": bool(store.origin_of(agent))}


def n_bytes_of(store: DiskStore, agent: Agent) -> int:
    """Bytes of its stored blocks, shared ones included."""
    return sum(known.n_bytes for known in store.disk.have(agent.blocks).values())


def print_fields(fields: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(fields))
        return
    for name, value in fields.items():
        shown = len(value) if isinstance(value, list | tuple) else value
        print(f"{name}: {shown}")
