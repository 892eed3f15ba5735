"""`keepwarm cache …`: inspect, pin, export and delete stored blocks and agents."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from keepwarm import config
from keepwarm.cli import agents
from keepwarm.cli.agents import (
    AsJson,
    BranchNumber,
    agent_fields,
    bar,
    n_bytes_of,
    open_store,
    print_fields,
)
from keepwarm.errors import BadInput, NewerFormat
from keepwarm.units import format_bytes

if TYPE_CHECKING:
    from keepwarm.cache.agents.agent import Agent
    from keepwarm.cache.disk_store import DiskStore
    from keepwarm.prefix.fingerprint import Identity

app = typer.Typer(no_args_is_help=True, help="Inspect, pin, export and delete stored blocks.")
app.add_typer(agents.app)


@app.command("ls")
def list_agents(
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="List prefixes that belong to no agent.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List agents."""
    with open_store() as store:
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
    table = Table("agent", "model", "turns", "tokens", "size", "pinned", "imported", "used")
    for row in rows:
        marks = ("yes" if row[mark] else "" for mark in ("pinned", "imported"))
        table.add_row(row["id"], row["model"], str(row["turns"]), *_size(row), *marks, _when(row))
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
def stats(as_json: AsJson = False) -> None:
    """Show blocks, bytes, limits and bytes written per day."""
    with open_store() as store:
        fields = asdict(store.disk.stats()) | {"written_by_day": store.wear.by_day()}
    print_fields(fields, as_json)


@app.command()
def path(as_json: AsJson = False) -> None:
    """Print the store's path."""
    store = str(config.load().store)
    print(json.dumps({"path": store}) if as_json else store)


@app.command()
def gc(as_json: AsJson = False) -> None:
    """Delete expired agents and quarantined records; free their space."""
    from keepwarm.store.disk.upkeep import clear_quarantine

    with open_store() as store, bar("cleaning up") as progress:
        expired = store.agents.expire(progress)
        n_bytes = clear_quarantine(store.disk, progress)
    print_fields({"expired_agents": expired, "quarantine_bytes": n_bytes}, as_json)


@app.command()
def verify(
    fix: Annotated[bool, typer.Option("--fix", help="Quarantine damaged records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every record; exit code 1 if any is damaged or unreadable."""
    from keepwarm.store.disk import fsck

    with open_store() as store, bar("verifying") as progress:
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
    print_fields({"records": n_records, "n_bytes": n_bytes, "newer": n_newer, "bad": bad}, as_json)
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
    branch: BranchNumber = None,
    *,
    sign: Annotated[
        Path | None, typer.Option("--sign", help="Sign it with this private key (Ed25519, PEM).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an agent or a prefix to a file that another machine can import."""
    from keepwarm.cache.agents.signing import BundleKeys

    keys = BundleKeys.of(config.load(), sign)
    with open_store() as store, bar("exporting") as progress:
        found = store.find(agent, tokens, turn, branch)
        n_records = store.export_agent(found, file, progress, keys.signing)
        if store.disk.seal is not None:
            print(f"{file} is not encrypted, so that other machines can read it.", file=sys.stderr)
    print_fields({"agent": agent, "records": n_records, "file": str(file)}, as_json)


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
    with Store(settings=settings) as store, bar("importing") as progress:
        ours = store.attach(loaded.module, loaded.path, salt=theirs.salt, **options)
        fits = partial(check_record, ours.manager.layout)
        made = store.on_disk.import_agent(
            file, ours.identity, agent, progress, keys=keys, check_record=fits
        )
        if check is not None:
            with Engine(loaded, store, settings=settings) as engine:
                made = ImportCheck(engine, made).run(check)
        print_fields(agent_fields(store.on_disk, made), as_json)


def _kv_options(theirs: Identity) -> dict[str, Any]:
    """The bundle's KV options that this version knows; unknown ones make the identity differ."""
    from keepwarm.text.request import KVOptions

    known = asdict(KVOptions()).keys() - {"quantized_kv_start"}  # part of the salt
    return {name: value for name, value in theirs.kv_options.items() if name in known}


def _summary(store: DiskStore, agent: Agent) -> dict[str, Any]:
    return {
        "id": agent.id,
        "model": agent.head.model,
        "turns": len(agent.turns),
        "branches": len(agent.branches),
        "n_tokens": agent.n_tokens,
        "n_bytes": n_bytes_of(store, agent),
        "pinned": agent.pinned,
        "imported": bool(store.origin_of(agent)),
        "used": agent.used,
    }
