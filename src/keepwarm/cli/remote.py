"""`keepwarm remote …`: what shared tiers hold, by model, class, tenant and age."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from keepwarm import config
from keepwarm.cli.agents import AsJson, format_date, open_store
from keepwarm.cli.options import print_table
from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.errors import BadInput, Unreachable
from keepwarm.prefix.fingerprint import tenant_of
from keepwarm.units import format_bytes

if TYPE_CHECKING:
    from keepwarm.agents.agent_store import AgentStore
    from keepwarm.prefix.blocks import Namespace
    from keepwarm.remote.backend import Backend
    from keepwarm.remote.opening import HeldBlob

AT_ONCE = 256  # names deleted in one call
CALL_S = 30.0
DAY_S = 86400.0
SHOWN = 12  # characters of a hash

OfModel = Annotated[str, typer.Option("--model", help="Records of this model, as ls shows it.")]
OfClass = Annotated[str, typer.Option("--class", help="Records of this class of machines.")]
OfTenant = Annotated[str, typer.Option("--tenant", help="Records of this tenant, as ls shows it.")]
Days = Annotated[float, typer.Option("--older-than", min=0.0, help="Unused for this many days.")]

app = typer.Typer(no_args_is_help=True, help="List, verify and delete records of shared tiers.")


class Wanted(NamedTuple):
    model: str
    compute_class: str
    tenant: str
    days: float

    def takes(self, one: Found) -> bool:
        return all(wanted in ("", has) for wanted, has in zip(self[:3], one, strict=False))


class Found(NamedTuple):
    model: str
    compute_class: str
    tenant: str
    held: HeldBlob


def _found(store: AgentStore, backend: Backend, wanted: Wanted) -> list[Found]:
    from keepwarm.remote.opening import held_blobs

    models = {agent.namespace: agent.head.model for agent in store.agents.all()}
    tenants: dict[Namespace, str] = {}
    found: list[Found] = []
    for held in held_blobs(backend):
        name = held.namespace
        if name not in tenants:
            tenants[name] = _tenant_of(store, name)
        model = models.get(name) or name.hex()[:SHOWN]
        found.append(Found(model, held.compute_class, tenants[name], held))
    taken = [one for one in found if wanted.takes(one)]
    return _unused(taken, wanted.days) if wanted.days else taken


def _unused(found: Sequence[Found], days: float) -> list[Found]:
    """Those that are not used for so long, nor what follows them: a bucket tells only when each was
    put, so that beginnings of prompts in daily use seem old.
    """
    from keepwarm.remote.janitor import RemoteLimits, surplus

    if not all(one.held.listed.used for one in found):
        raise BadInput(
            "A shared tier does not tell when its records were last used, as Redis with an LFU "
            "policy; leave --older-than out."
        )
    by_name = {one.held.listed.name: one for one in found}
    listed, limits = [one.held.listed for one in found], RemoteLimits(age_s=days * DAY_S)
    return [by_name[old.name] for old in surplus(listed, limits, time.time())]


def _tenant_of(store: AgentStore, name: Namespace) -> str:
    try:
        return tenant_of(store.identity_of(name).salt)[:SHOWN]
    except BadInput:  # a model that was never run here
        return "?"


def _addresses() -> list[str]:
    addresses = config.load().remotes
    if not addresses:
        raise BadInput("No shared tier is named; set KEEPWARM_REMOTE to its address.")
    return addresses


@contextmanager
def _opened(address: str) -> Iterator[Backend]:
    from keepwarm.remote.addresses import open_backend
    from keepwarm.remote.handshake import read_mark

    password = config.load().read_secret("remote_password")
    with closing(open_backend(address, password)) as backend:
        try:
            if read_mark(backend, CallDeadline(CALL_S)) is None:
                raise BadInput(
                    f"The shared tier {address} has no mark: it is not mounted, or was never used; "
                    "mount it, or correct KEEPWARM_REMOTE."
                )
            yield backend
        except CallError as error:
            raise Unreachable(f"The shared tier {address} cannot be asked: {error}") from error


@app.command("ls")
def list_records(
    model: OfModel = "",
    compute_class: OfClass = "",
    tenant: OfTenant = "",
    older_than: Days = 0.0,
    as_json: AsJson = False,
) -> None:
    """List what shared tiers hold, and how many bytes.

    A model or tenant that this machine does not know is shown by its hash.
    """
    wanted = Wanted(model, compute_class, tenant, older_than)
    groups: defaultdict[tuple[str, ...], list[HeldBlob]] = defaultdict(list)
    with open_store() as store:
        for address in _addresses():
            with _opened(address) as backend:
                for one in _found(store, backend, wanted):
                    groups[address, *one[:3]].append(one.held)
    rows = [_row(names, groups[names]) for names in sorted(groups)]
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print("Nothing is there.")
        return
    columns = ("model", "class", "tenant", "records", "size", "first use", "last use", "tier")
    print_table(columns, [_cells(row) for row in rows], below=["tier"])


def _cells(row: dict[str, Any]) -> list[str]:
    names = [row[name] for name in ("model", "class", "tenant")]
    ages = (row[name] for name in ("oldest", "newest"))
    dates = (format_date(age)[:10] if age else "unknown" for age in ages)
    return [*names, f"{row['records']:,}", format_bytes(row["n_bytes"]), *dates, row["tier"]]


def _row(names: tuple[str, ...], held: list[HeldBlob]) -> dict[str, Any]:
    used = [one.listed.used for one in held if one.listed.used]
    n_bytes = sum(one.listed.n_bytes for one in held)
    sizes = {"records": _n_records(held), "n_bytes": n_bytes}
    ages = {"oldest": min(used, default=None), "newest": max(used, default=None)}
    return dict(zip(("tier", "model", "class", "tenant"), names, strict=True)) | sizes | ages


def _n_records(held: list[HeldBlob]) -> int:
    """Without what is told of past answers."""
    return sum(one.record is not None for one in held)


@app.command()
def rm(
    model: OfModel = "",
    compute_class: OfClass = "",
    tenant: OfTenant = "",
    older_than: Days = 0.0,
    everything: Annotated[bool, typer.Option("--all", help="Delete all records.")] = False,
) -> None:
    """Delete records from shared tiers.

    Machines that have them share them again with their next use.
    """
    wanted = Wanted(model, compute_class, tenant, older_than)
    if not any(wanted) and not everything:
        raise BadInput("Say what to delete: --model, --class, --tenant, --older-than or --all.")
    if any(wanted) and everything:
        raise BadInput("--all deletes all records; leave it out to delete some of them.")
    n_deleted = 0
    with open_store() as store:
        for address in _addresses():
            with _opened(address) as backend:
                doomed = [one.held for one in _found(store, backend, wanted)]
                names = [held.listed.name for held in doomed]
                for start in range(0, len(names), AT_ONCE):
                    backend.delete(names[start : start + AT_ONCE], CALL_S)
                n_deleted += _n_records(doomed)
    print(f"Deleted {n_deleted:,} records.")


@app.command()
def verify(
    model: OfModel = "",
    compute_class: OfClass = "",
    tenant: OfTenant = "",
    older_than: Days = 0.0,
) -> None:
    """Check every byte of every record; exits with 1 if one is bad."""
    from keepwarm.remote.opening import find_fault
    from keepwarm.remote.records import FleetKey

    fleet_key = FleetKey.parse(config.load().read_secret("fleet_key"))
    wanted = Wanted(model, compute_class, tenant, older_than)
    n_records = n_bad = 0
    with open_store() as store:
        for address in _addresses():
            with _opened(address) as backend:
                for _, _, _, held in _found(store, backend, wanted):
                    if held.record is None:
                        continue
                    n_records, name = n_records + 1, held.listed.name
                    if why := find_fault(backend, name, held.record, store.disk.cipher, fleet_key):
                        n_bad += 1
                        print(f"{name}: {why}")
    print(f"{n_records - n_bad:,} of {n_records:,} records are intact.")
    raise typer.Exit(1 if n_bad else 0)
