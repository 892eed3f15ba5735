"""`keepwarm cache …`: inspect, pin, export and delete stored blocks and agents."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepwarm import config
from keepwarm.cli import agents
from keepwarm.cli.agents import (
    AgentId,
    AsJson,
    BranchNumber,
    delete_shared,
    format_date,
    n_bytes_of,
    open_store,
    print_agent,
    print_fields,
)
from keepwarm.cli.options import check_parents, file_errors, load_model, print_table
from keepwarm.errors import BadInput
from keepwarm.progress import shown
from keepwarm.units import format_bytes

if TYPE_CHECKING:
    from keepwarm.agents.agent import Agent
    from keepwarm.agents.agent_store import AgentStore
    from keepwarm.agents.bundle import Manifest
    from keepwarm.agents.signing import BundleKeys

NOT_EXPORTED = "nothing was exported"
PROMPT_CACHE = ".safetensors"
FORMAT_HELP = "bundle, or for other programs mlx-lm or swift: a prompt-cache file (.safetensors)."

app = typer.Typer(no_args_is_help=True, help="Inspect, pin, export and delete stored blocks.")
app.add_typer(agents.app)


@app.command("ls")
def list_agents(as_json: AsJson = False) -> None:
    """List agents."""
    with open_store() as store:
        rows = [_summary(store, agent) for agent in store.agents.all()]
    if as_json:
        print(json.dumps(rows))
    elif rows:
        _print_agents(rows)
    else:
        print("No agents yet; `keepwarm run --agent NAME` creates one.")


def _print_agents(rows: list[dict[str, Any]]) -> None:
    names = ("title", "turns", "tokens", "size", "used", "agent", "model", "pinned", "imported")
    cells = [
        (
            row["title"],
            str(row["turns"]),
            str(row["n_tokens"]),
            format_bytes(row["n_bytes"]),
            format_date(row["used"]),
            row["id"],
            row["model"],
            *(mark if row[mark] else "" for mark in ("pinned", "imported")),
        )
        for row in rows
    ]
    print_table(names, cells, below=names[5:], shortened="title")


@app.command()
def stats(as_json: AsJson = False) -> None:
    """Show what is stored, and how much was reused.

    Blocks, bytes, hit rate, tokens reused by tier, and bytes written per day.
    """
    with open_store() as store:
        stored, figures = asdict(store.disk.stats()), store.counts.total().figures()
        texts, written = store.text_bytes(), {"written_by_day": store.wear.by_day()}
    if as_json:
        counted = {name: figures[name]["disk"] for name in ("hits", "misses")}
        print_fields(stored | texts | counted | {"prompts": figures} | written, as_json)
        return
    kept = {name: stored[name] for name in ("blocks", "n_bytes", "max_bytes")}
    hits = {tier: n for tier, n in figures.pop("hits").items() if n}
    by_tier = [f"{n:,} from {tier}" for tier, n in hits.items()]
    cold = figures["requests"] - sum(hits.values())
    figures["requests"] = f"{figures['requests']:,} ({', '.join([*by_tier, f'{cold:,} cold'])})"
    del figures["misses"]
    print_fields(kept | texts | figures | written, as_json)


@app.command()
def gc(as_json: AsJson = False) -> None:
    """Delete expired and empty agents, what is left of deleted ones, and quarantined records."""
    from keepwarm.store.disk.maintenance import clear_quarantine

    with open_store() as store, shown("cleaning up") as line:
        expired = store.agents.expire(store.agents.expired(), line.count)
        empty = store.agents.delete_empty()
        n_bytes = clear_quarantine(store.disk, line.count)
        shared = delete_shared(store)
    fields = {"expired_agents": expired, "empty_agents": empty, "quarantine_bytes": n_bytes}
    print_fields(fields | shared, as_json)


@app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete every agent and every block.

    They are deleted from the memory of running servers, too.
    """
    if not yes and not sys.stdin.isatty():
        raise BadInput(
            "`keepwarm cache clear` deletes everything; without a terminal it needs --yes."
        )
    if not yes:
        typer.confirm(f"Delete everything in {config.load().store}?", abort=True, err=True)
    with open_store() as store, shown("deleting") as line:
        n_agents, n_blocks = store.clear(line.count)
        shared = delete_shared(store)
    print_fields({"removed_agents": n_agents, "removed_blocks": n_blocks} | shared, as_json)


@app.command()
def verify(
    fix: Annotated[bool, typer.Option("--fix", help="Quarantine damaged records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every record and agent.

    The exit code is 1 if any is damaged or unreadable.
    """
    from keepwarm.agents.verify import verify_store

    with open_store() as store, shown("verifying") as line:
        report = verify_store(store, fix, line.count_bytes)
    print_fields(report.fields(), as_json)
    if not as_json:
        for each in report.bad:
            state = " (quarantined)" if each.quarantined else ""
            print(f"{each.record}: {each.reason}{state}")
    if report.bad:
        raise typer.Exit(1)


@app.command()
def export(
    agent: AgentId,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Export only the first N tokens.")
    ] = None,
    turn: Annotated[int | None, typer.Option("--turn", help="Export only up to this turn.")] = None,
    branch: BranchNumber = None,
    *,
    sign: Annotated[
        Path | None, typer.Option("--sign", help="Sign it with this private key (Ed25519, PEM).")
    ] = None,
    form: Annotated[str, typer.Option("--format", help=FORMAT_HELP)] = "bundle",
    model: Annotated[
        str | None, typer.Option("--model", help="Model of the agent, for a prompt-cache file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write an agent to a file.

    Another machine can import it; --format writes it for other programs.
    """
    from keepwarm.agents.signing import BundleKeys

    if form != "bundle" and sign is not None:
        raise BadInput("--sign is for bundles; a prompt-cache file cannot be signed.")
    if form == "bundle" and model is not None:
        raise BadInput("--model is for a prompt-cache file; name its --format, or leave it out.")
    if tokens is not None and turn is not None:
        raise BadInput("--tokens and --turn cannot be combined: each says where to end.")
    settings = config.load(model=model)
    with file_errors(file, "written", NOT_EXPORTED):
        _check_target(file, force)
    if form != "bundle":
        n_tokens = _export_prompt_file(settings, form, file, (agent, tokens, turn, branch))
        print_fields({"agent": agent, "tokens": n_tokens, "file": str(file)}, as_json)
        return
    keys = BundleKeys.of(settings, sign)
    with open_store() as store, shown("exporting") as line:
        found = store.find(agent, tokens, turn, branch)
        with file_errors(file, "written", NOT_EXPORTED):
            n_records = store.export_agent(found, file, line.count, keys.signing)
        if store.disk.cipher is not None:
            print(f"{file} is not encrypted, so that other machines can read it.", file=sys.stderr)
    print_fields({"agent": agent, "records": n_records, "file": str(file)}, as_json)


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="The bundle, or a prompt-cache file of mlx-lm or Swift.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="Model of the bundle; default from the settings.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="New id for the agent.")] = None,
    *,
    trust: Annotated[
        list[Path] | None,
        typer.Option(
            "--trust", metavar="FILE", help="Import only if it is signed with this public key."
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", help="Token ids of a prompt-cache file, as a JSON list."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import a bundle or a prompt-cache file.

    It must come from the same weights and KV dtype. Unless a trusted key signed it, only this
    agent and its forks are served from it.
    """
    from keepwarm.agents.signing import BundleKeys

    settings = config.load(model=model)
    if file.suffix == PROMPT_CACHE and trust:
        raise BadInput("--trust is for bundles; a prompt-cache file is not signed.")
    if file.suffix != PROMPT_CACHE and tokens is not None:
        raise BadInput("--tokens is for prompt-cache files (.safetensors); a bundle has its own.")
    _check_source(file)
    if file.suffix == PROMPT_CACHE:
        made = _import_prompt_file(settings, file, agent, tokens)
    else:
        keys = BundleKeys.of(settings, trust=trust or ())
        made = _import_bundle(settings, file, agent, keys)
    with open_store() as store:
        print_agent(store, made, as_json)


def _summary(store: AgentStore, agent: Agent) -> dict[str, Any]:
    return {
        "id": agent.id,
        "title": agent.title,
        "model": agent.head.model,
        "turns": len(agent.turns),
        "branches": len(agent.branches),
        "n_tokens": agent.n_tokens,
        "n_bytes": n_bytes_of(store, agent),
        "pinned": agent.pinned,
        "imported": bool(store.origin_of(agent)),
        "used": agent.used,
    }


def _import_bundle(
    settings: config.Settings, file: Path, agent: str | None, keys: BundleKeys
) -> Agent:
    """Store a bundle as an agent."""
    from keepwarm.agents.agent_store import name_of
    from keepwarm.agents.bundle import manifest_in
    from keepwarm.cache.identity import make_options_in
    from keepwarm.cache.restore.records import check_record
    from keepwarm.cache.store import Store

    manifest = manifest_in(file)
    _refuse_download(settings, file, manifest)
    theirs = manifest.identity
    with Store(settings=settings) as store:
        store.on_disk.agents.check_new(agent or name_of(manifest, file))
        model, options = load_model(settings), make_options_in(theirs)
        ours = store.attach(model.module, model.path, salt=theirs.salt, **options)
        fits = partial(check_record, ours.restorer.layout)
        with shown("importing") as line:
            return store.on_disk.import_agent(
                file,
                ours.identity,
                agent,
                line.count_bytes,
                model.name,
                keys=keys,
                check_record=fits,
            )


def _refuse_download(settings: config.Settings, file: Path, manifest: Manifest) -> None:
    """Raise before a model is downloaded that a bundle does not name."""
    from keepwarm.models.catalog import find, find_local

    name = settings.model
    if manifest.model in ("", name) or find_local(name) or find(name, settings):
        return
    raise BadInput(
        f"{file} needs {manifest.model_text}; name that model with --model. {name} is not on this "
        f"machine: if it is the same one, download it first with `keepwarm pull {name}`."
    )


def _import_prompt_file(
    settings: config.Settings, file: Path, agent: str | None, tokens: Path | None
) -> Agent:
    """Store a prompt-cache file as an agent."""
    from keepwarm.cache.store import Store
    from keepwarm.cli.prompt_files import import_prompt_file, read_prompt_file

    read, called = read_prompt_file(file, tokens), agent or file.stem
    with Store(settings=settings) as store:
        store.on_disk.agents.check_new(called)
        return import_prompt_file(store, load_model(settings), read, called)


def _export_prompt_file(
    settings: config.Settings,
    form: str,
    file: Path,
    what: tuple[str, int | None, int | None, int | None],
) -> int:
    """Write an agent as a prompt-cache file; the number of tokens."""
    from keepwarm.cache.store import Store
    from keepwarm.cli.prompt_files import FORMATS, export_prompt_file

    if form not in FORMATS:
        known = ", ".join(("bundle", *FORMATS))
        raise BadInput(f"--format is {form!r}; it must be one of {known}.")
    with Store(settings=settings) as store:
        agent, model = store.on_disk.find(*what), load_model(settings)
        with file_errors(file, "written", NOT_EXPORTED):
            return export_prompt_file(store, model, agent, file, FORMATS[form])


def _check_source(file: Path) -> None:
    """Fail before the model is loaded."""
    with file_errors(file, "read"):
        if file.is_dir():
            raise BadInput(f"{file} is a directory; name a file in it.")
        if not file.exists():
            raise BadInput(f"There is no file {file}.")
        if not file.is_file():  # a pipe would be waited for
            raise BadInput(f"{file} is not a regular file; name one.")


def _check_target(file: Path, force: bool) -> None:
    """Fail before anything is read, which may take minutes."""
    check_parents(file)
    if file.is_symlink() or (file.exists() and not file.is_file()):  # it would be replaced by one
        raise BadInput(f"{file} is not a regular file; choose another name.")
    if file.exists() and not force:
        raise BadInput(f"{file} exists; choose another name, or replace it with --force.")
