"""`keepwarm cache …`: inspect, pin, export and delete stored blocks and agents."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from keepwarm import config
from keepwarm.errors import BadInput, NewerFormat
from keepwarm.units import format_bytes

if TYPE_CHECKING:
    from keepwarm.cache.agents.agent import Agent
    from keepwarm.cache.disk_store import DiskStore
    from keepwarm.prefix.fingerprint import Identity
    from keepwarm.store.disk.upkeep import Progress

app = typer.Typer(no_args_is_help=True, help="Inspect, pin, export and delete stored blocks.")

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AgentId: TypeAlias = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")]


def _open_store() -> DiskStore:
    from keepwarm.cache.disk_store import DiskStore
    from keepwarm.store.disk.disk import DiskLimits

    settings = config.load()
    limits, per_day = DiskLimits(settings.disk_bytes), settings.disk_writes_per_day or None
    return DiskStore(settings.store, limits, per_day, settings.read_encryption_key())


@contextmanager
def _bar(label: str) -> Iterator[Progress]:
    """A progress bar on stderr, if that is a terminal."""
    hidden = not sys.stderr.isatty()
    with bars.Progress(console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@app.command("ls")
def list_agents(
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="List prefixes that belong to no agent.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List agents."""
    with _open_store() as store:
        if prefixes:
            rows = [prefix._asdict() for prefix in store.prefixes()]
        else:
            rows = [_summary(store, agent) for agent in store.agents.all()]
    if as_json:
        print(json.dumps(rows))
    elif prefixes:
        Console().print(_prefix_table(rows) if rows else "No unnamed prefixes stored.")
    elif rows:
        Console().print(_agent_table(rows))
    else:
        print("No agents yet; `keepwarm run --agent NAME` creates one.")


def _agent_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("agent", "turns", "tokens", "size", "pinned", "imported", "used")
    for row in rows:
        marks = ("yes" if row[mark] else "" for mark in ("pinned", "imported"))
        table.add_row(row["id"], str(row["turns"]), *_size(row), *marks, _when(row))
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
    """Show one agent: turns, size, pin, quota, retention."""
    with _open_store() as store:
        found = store.agents.show(agent)
        _print(_agent_fields(store, found) | {"n_bytes": _n_bytes(store, found)}, as_json)


@app.command()
def stats(as_json: AsJson = False) -> None:
    """Show blocks, bytes, limits and bytes written per day."""
    with _open_store() as store:
        fields = asdict(store.disk.stats()) | {"written_by_day": store.wear.by_day()}
    _print(fields, as_json)


@app.command()
def path(as_json: AsJson = False) -> None:
    """Print the store's path."""
    store = str(config.load().store)
    print(json.dumps({"path": store}) if as_json else store)


@app.command()
def pin(agent: AgentId, as_json: AsJson = False) -> None:
    """Protect an agent's blocks from eviction."""
    _update_agent(agent, as_json, pinned=True)


@app.command()
def unpin(agent: AgentId, as_json: AsJson = False) -> None:
    """Allow an agent's blocks to be evicted."""
    _update_agent(agent, as_json, pinned=False)


@app.command()
def quota(
    agent: AgentId,
    n_bytes: Annotated[int, typer.Argument(help="Bytes to reserve; 0 removes the quota.")],
    as_json: AsJson = False,
) -> None:
    """Reserve bytes for an agent that other agents cannot evict."""
    _update_agent(agent, as_json, quota_bytes=n_bytes or None)


@app.command()
def fork(
    agent: AgentId,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Id of the new agent.")],
    as_json: AsJson = False,
) -> None:
    """Create an agent with the same history; no block is copied."""
    with _open_store() as store:
        _print(json.loads(store.agents.fork(agent, new).to_json()), as_json)


@app.command()
def rewind(
    agent: AgentId,
    turn: Annotated[int, typer.Argument(help="Last turn to keep; 0 drops all.")],
    as_json: AsJson = False,
) -> None:
    """Drop an agent's turns after this one."""
    with _open_store() as store:
        _print(json.loads(store.agents.rewind(agent, turn).to_json()), as_json)


@app.command("rm")
def remove(agent: AgentId, as_json: AsJson = False) -> None:
    """Delete an agent and every block that no other agent uses."""
    with _open_store() as store, _bar("deleting") as progress:
        n_blocks = store.agents.delete(agent, progress)
    _print({"agent": agent, "removed_blocks": n_blocks}, as_json)


@app.command()
def gc(as_json: AsJson = False) -> None:
    """Delete expired agents and quarantined records; free their space."""
    from keepwarm.store.disk.upkeep import clear_quarantine

    with _open_store() as store, _bar("cleaning up") as progress:
        expired = store.agents.expire(progress)
        n_bytes = clear_quarantine(store.disk, progress)
    _print({"expired_agents": expired, "quarantine_bytes": n_bytes}, as_json)


@app.command()
def verify(
    fix: Annotated[bool, typer.Option("--fix", help="Quarantine damaged records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every record; exit code 1 if any is damaged or unreadable."""
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
                bad.append(_bad_record(name, checked.wrong, checked.quarantined))
    _print({"records": n_records, "n_bytes": n_bytes, "newer": n_newer, "bad": bad}, as_json)
    if bad:
        raise typer.Exit(1)


def _bad_agent(store: DiskStore, name: str, why: Exception, fix: bool) -> dict[str, Any]:
    """Quarantines a damaged agent file if asked to; never one that could not be read."""
    record = f"agents/{name}"
    if isinstance(why, OSError):
        return _bad_record(record, f"could not be read: {why.strerror or why}", False)
    quarantined = fix and store.disk.records.move_to_quarantine(store.disk.root / record, str(why))
    return _bad_record(record, str(why), quarantined)


def _bad_record(record: str, reason: str, quarantined: bool) -> dict[str, Any]:
    fields = {"record": record, "reason": reason, "quarantined": quarantined}
    return fields | {"wrong": reason, "set_aside": quarantined}  # deprecated names


@app.command()
def export(
    agent: Annotated[
        str, typer.Argument(metavar="AGENT", help="Agent id, or prefix id (@ and digits).")
    ],
    file: Annotated[Path, typer.Argument(help="The bundle to write.")],
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Export only the first N tokens.")
    ] = None,
    turn: Annotated[int | None, typer.Option("--turn", help="Export only up to this turn.")] = None,
    *,
    sign: Annotated[
        Path | None, typer.Option("--sign", help="Sign it with this private key (Ed25519, PEM).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an agent or a prefix to a file that another machine can import."""
    from keepwarm.cache.agents.signing import BundleKeys

    keys = BundleKeys.of(config.load(), sign)
    with _open_store() as store, _bar("exporting") as progress:
        found = store.find(agent, tokens, turn)
        n_records = store.export_agent(found, file, progress, keys.signing)
        if store.disk.seal is not None:
            print(f"{file} is not encrypted, so that other machines can read it.", file=sys.stderr)
    _print({"agent": agent, "records": n_records, "file": str(file)}, as_json)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="The bundle to read.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Model of the bundle; default from the settings.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="New id for the agent.")] = None,
    *,
    trust: Annotated[
        list[Path] | None,
        typer.Option("--trust", help="Import only if it is signed with this public key."),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="N|all", help="Compute so many blocks and compare."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import a bundle made with the same weights and KV dtype.

    Unless a trusted key signed it, only this agent and its forks are served from it.
    """
    from keepwarm.cache.agents.bundle import identity_in
    from keepwarm.cache.agents.signing import BundleKeys
    from keepwarm.cache.restore.records import check_record
    from keepwarm.cache.store import Store
    from keepwarm.engine.engine import Engine
    from keepwarm.engine.insight.recompute import EXTENT, ImportCheck
    from keepwarm.models.load import load

    settings = config.load(model=model)
    keys = BundleKeys.of(settings, trust=trust or ())
    if check is not None and not re.fullmatch(EXTENT, check):
        raise BadInput(f"--check is {check!r}; it must be a number of blocks, or all.")
    theirs = identity_in(file)
    loaded, options = load(settings.model, settings), _kv_options(theirs)
    with Store(settings=settings) as store, _bar("importing") as progress:
        ours = store.attach(loaded.module, loaded.path, salt=theirs.salt, **options)
        fits = partial(check_record, ours.manager.layout)
        made = store.on_disk.import_agent(
            file, ours.identity, agent, progress, keys=keys, check_record=fits
        )
        if check is not None:
            with Engine(loaded, store, settings=settings) as engine:
                made = ImportCheck(engine, made).run(check)
        _print(_agent_fields(store.on_disk, made), as_json)


@app.command()
def release(agent: AgentId, as_json: AsJson = False) -> None:
    """Vouch for an imported agent: its blocks then serve every prompt that begins alike."""
    with _open_store() as store, _bar("releasing") as progress:
        _print(_agent_fields(store, store.release(agent, progress)), as_json)


def _kv_options(theirs: Identity) -> dict[str, Any]:
    """The bundle's KV options that this version knows; unknown ones make the identity differ."""
    from keepwarm.text.request import KVOptions

    known = asdict(KVOptions()).keys() - {"quantized_kv_start"}  # part of the salt
    return {name: value for name, value in theirs.kv_options.items() if name in known}


def _update_agent(agent: str, as_json: bool, **changes: Any) -> None:
    with _open_store() as store:
        _print(json.loads(store.agents.update(agent, **changes).to_json()), as_json)


def _agent_fields(store: DiskStore, agent: Agent) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(agent.to_json())
    return fields | {"imported": bool(store.origin_of(agent))}


def _summary(store: DiskStore, agent: Agent) -> dict[str, Any]:
    return {
        "id": agent.id,
        "turns": len(agent.turns),
        "n_tokens": agent.n_tokens,
        "n_bytes": _n_bytes(store, agent),
        "pinned": agent.pinned,
        "imported": bool(store.origin_of(agent)),
        "used": agent.used,
    }


def _n_bytes(store: DiskStore, agent: Agent) -> int:
    """Bytes of its stored blocks, shared ones included."""
    return sum(known.n_bytes for known in store.disk.have(agent.blocks).values())


def _print(fields: dict[str, Any], as_json: bool) -> None:
    fields.pop("namespace", None)  # secret in an encrypted store
    if as_json:
        print(json.dumps(fields))
        return
    for name, value in fields.items():
        shown = len(value) if isinstance(value, list | tuple) else value
        print(f"{name}: {shown}")
