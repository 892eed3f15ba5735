"""`keepwarm cache …`: what is kept, for whom, and how to keep, carry or forget it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from keepwarm import config
from keepwarm.errors import NewerFormat
from keepwarm.units import format_bytes

if TYPE_CHECKING:
    from keepwarm.cache.agents.agents import Agent
    from keepwarm.cache.disk_store import DiskStore
    from keepwarm.prefix.fingerprint import Identity
    from keepwarm.store.disk.upkeep import Progress

app = typer.Typer(no_args_is_help=True, help="Look at, keep, carry and forget stored blocks.")

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
AgentId: TypeAlias = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")]


def _open_store() -> DiskStore:
    from keepwarm.cache.disk_store import DiskStore
    from keepwarm.store.disk.disk import DiskLimits

    settings = config.load()
    limits, per_day = DiskLimits(settings.disk_bytes), settings.disk_writes_per_day or None
    return DiskStore(settings.store, limits, per_day, settings.read_encryption_key())


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """Shows on the terminal, if there is one, how much of a long work is done."""
    hidden = not sys.stderr.isatty()
    with bars.Progress(console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@app.command("ls")
def list_agents(
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="List what is kept under no agent's name.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the agents."""
    with _open_store() as store:
        if prefixes:
            rows = [prefix._asdict() for prefix in store.prefixes()]
        else:
            rows = [_summary(store, agent) for agent in store.agents.all()]
    if as_json:
        print(json.dumps(rows))
    elif prefixes:
        Console().print(_prefix_table(rows) if rows else "Nothing is kept that is no agent's.")
    elif rows:
        Console().print(_agent_table(rows))
    else:
        print("No agents yet; `keepwarm run --agent NAME` makes one.")


def _agent_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("agent", "turns", "tokens", "size", "pinned", "used")
    for row in rows:
        pinned = "yes" if row["pinned"] else ""
        table.add_row(row["id"], str(row["turns"]), *_size(row), pinned, _when(row))
    return table


def _prefix_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("prefix", "tokens", "size", "used")
    for row in rows:
        table.add_row(row["id"], *_size(row), _when(row))
    return table


def _size(row: dict[str, Any]) -> tuple[str, str]:
    return str(row["n_tokens"]), format_bytes(row["n_bytes"])


def _when(row: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used"]))


@app.command()
def show(agent: AgentId, as_json: AsJson = False) -> None:
    """Show one agent: its turns, its size, what was promised to it."""
    with _open_store() as store:
        found = store.agents.show(agent)
        fields = json.loads(found.to_json()) | {"n_bytes": _n_bytes(store, found)}
    _print(fields, as_json)


@app.command()
def stats(as_json: AsJson = False) -> None:
    """Blocks, bytes, limits and what was written, by day."""
    with _open_store() as store:
        fields = asdict(store.disk.stats()) | {"written_by_day": store.wear.by_day()}
    _print(fields, as_json)


@app.command()
def path(as_json: AsJson = False) -> None:
    """Print where the blocks are kept."""
    place = str(config.load().store)
    print(json.dumps({"path": place}) if as_json else place)


@app.command()
def pin(agent: AgentId, as_json: AsJson = False) -> None:
    """Protect an agent's blocks from eviction."""
    _promise(agent, as_json, pinned=True)


@app.command()
def unpin(agent: AgentId, as_json: AsJson = False) -> None:
    """Let an agent's blocks be evicted when room is needed."""
    _promise(agent, as_json, pinned=False)


@app.command()
def quota(
    agent: AgentId,
    n_bytes: Annotated[int, typer.Argument(help="Bytes; 0 takes the quota away.")],
    as_json: AsJson = False,
) -> None:
    """Promise an agent so many bytes that nobody else may evict."""
    _promise(agent, as_json, quota_bytes=n_bytes or None)


@app.command()
def fork(
    agent: AgentId,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Id of the new agent.")],
    as_json: AsJson = False,
) -> None:
    """Make another agent with the same past; no block is copied."""
    with _open_store() as store:
        _print(json.loads(store.agents.fork(agent, new).to_json()), as_json)


@app.command()
def rewind(
    agent: AgentId,
    turn: Annotated[int, typer.Argument(help="The last turn to keep; 0 forgets all.")],
    as_json: AsJson = False,
) -> None:
    """Forget an agent's turns after this one."""
    with _open_store() as store:
        _print(json.loads(store.agents.rewind(agent, turn).to_json()), as_json)


@app.command("rm")
def remove(agent: AgentId, as_json: AsJson = False) -> None:
    """Delete an agent and every block no other agent reaches."""
    with _open_store() as store, _bar("removing") as progress:
        n_blocks = store.agents.delete(agent, progress)
    _print({"agent": agent, "removed_blocks": n_blocks}, as_json)


@app.command()
def gc(as_json: AsJson = False) -> None:
    """Forget agents past their retention, drop what bad records left, give space back."""
    from keepwarm.store.disk.upkeep import clear_quarantine

    with _open_store() as store, _bar("cleaning up") as progress:
        expired = store.agents.expire(progress)
        n_bytes = clear_quarantine(store.disk, progress)
    _print({"expired_agents": expired, "quarantine_bytes": n_bytes}, as_json)


@app.command()
def verify(
    fix: Annotated[bool, typer.Option("--fix", help="Set bad records aside.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read everything and check it; exit code 1 if something is bad or cannot be read."""
    from keepwarm.store.disk import fsck

    with _open_store() as store, _bar("verifying") as progress:
        bad: list[dict[str, Any]] = []
        n_records = n_bytes = n_newer = 0
        for name, why in store.agents.unreadable():
            n_newer += isinstance(why, NewerFormat)
            if not isinstance(why, NewerFormat):
                bad.append(_bad_agent(store, name, why, fix))
        n_blocks = store.disk.stats().blocks
        for checked in fsck.verify(store.disk, fix):
            n_records, n_bytes = n_records + 1, n_bytes + checked.n_bytes
            n_newer += checked.newer
            progress(n_records, max(n_records, n_blocks))
            if checked.wrong is not None:
                name = f"{checked.key.hex()}.{checked.part.value}"
                bad.append(
                    {"record": name, "wrong": checked.wrong, "set_aside": checked.quarantined}
                )
    _print({"records": n_records, "n_bytes": n_bytes, "newer": n_newer, "bad": bad}, as_json)
    if bad:
        raise typer.Exit(1)


def _bad_agent(store: DiskStore, name: str, why: Exception, fix: bool) -> dict[str, Any]:
    """What `verify` says of an agent's file; a torn one can be set aside, one not read may not."""
    record = f"agents/{name}"
    if isinstance(why, OSError):
        wrong = f"could not be read: {why.strerror or why}"
        return {"record": record, "wrong": wrong, "set_aside": False}
    aside = fix and store.disk.records.move_to_quarantine(store.disk.root / record, str(why))
    return {"record": record, "wrong": str(why), "set_aside": aside}


@app.command()
def export(
    agent: Annotated[
        str, typer.Argument(metavar="AGENT", help="Its id, or that of a prefix: @ and digits.")
    ],
    file: Annotated[Path, typer.Argument(help="The bundle to write.")],
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Only the first so many tokens.")
    ] = None,
    turn: Annotated[int | None, typer.Option("--turn", help="Only up to this turn.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write an agent, or any prefix, into one file that another machine can import."""
    with _open_store() as store, _bar("exporting") as progress:
        found = store.find(agent, tokens, turn)
        n_records = store.export_agent(found, file, progress)
        if store.disk.seal is not None:
            print(f"{file} is not encrypted, so that it can be read elsewhere.", file=sys.stderr)
    _print({"agent": agent, "records": n_records, "file": str(file)}, as_json)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="The bundle to read.")],
    model: Annotated[
        str | None, typer.Option("--model", help="The model it belongs to, if not the default.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Another id for the agent.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read a bundle, verified, for the same weights and KV dtype."""
    from keepwarm.cache.agents.bundle import identity_in
    from keepwarm.cache.store import identity_of
    from keepwarm.models.load import load

    settings = config.load(model=model)
    theirs = identity_in(file)
    loaded = load(settings.model, settings)
    expected = identity_of(
        loaded.module, loaded.path, settings, salt=theirs.salt, **_kv_options(theirs)
    )
    with _open_store() as store, _bar("importing") as progress:
        made = store.import_agent(file, expected, agent, progress)
    _print(json.loads(made.to_json()), as_json)


def _kv_options(theirs: Identity) -> dict[str, Any]:
    """Those a bundle was made with, as far as they are known here: with any other, it differs."""
    from keepwarm.text.request import KVOptions

    known = asdict(KVOptions()).keys() - {"quantized_kv_start"}  # which is part of the salt
    return {name: value for name, value in theirs.kv_options.items() if name in known}


def _promise(agent: str, as_json: bool, **changes: Any) -> None:
    with _open_store() as store:
        _print(json.loads(store.agents.update(agent, **changes).to_json()), as_json)


def _summary(store: DiskStore, agent: Agent) -> dict[str, Any]:
    return {
        "id": agent.id,
        "turns": len(agent.turns),
        "n_tokens": agent.n_tokens,
        "n_bytes": _n_bytes(store, agent),
        "pinned": agent.pinned,
        "used": agent.used,
    }


def _n_bytes(store: DiskStore, agent: Agent) -> int:
    """Bytes of its blocks that are still there, shared ones included."""
    return sum(known.n_bytes for known in store.disk.have(agent.blocks).values())


def _print(fields: dict[str, Any], as_json: bool) -> None:
    fields.pop("namespace", None)  # a secret where the store is encrypted
    if as_json:
        print(json.dumps(fields))
        return
    for name, value in fields.items():
        shown = len(value) if isinstance(value, list | tuple) else value
        print(f"{name}: {shown}")
