"""`keepwarm launch`: start a coding agent, and a server if there is none, or print its settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from subprocess import DEVNULL, Popen
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Annotated, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import typer

from keepwarm import config
from keepwarm.cli.options import first_key
from keepwarm.errors import BadInput, Refused, Unreachable
from keepwarm.progress import shown
from keepwarm.server.http.clients import CLIENTS, KEY_VARIABLE, NO_KEY, ClientSetup, ServerInfo
from keepwarm.units import format_bytes

TIMEOUT_S = 10
POLL_S = 0.1


class Key(NamedTuple):
    value: str
    shell: str  # shell expression that expands to the value


def launch(
    client: Annotated[
        str,
        typer.Argument(help=f"One of {', '.join(CLIENTS)}.", autocompletion=lambda: list(CLIENTS)),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENT", help="Arguments for the client, after --."),
    ] = None,
    *,
    url: Annotated[
        str | None, typer.Option("--url", help="Server URL; default from the settings.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="For a server that is started: default the largest that fits."
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option("--agent", help="Agent id for everything that the client sends."),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the client's settings, and start nothing.")
    ] = False,
    show_key: Annotated[
        bool,
        typer.Option("--show-key", help="Print the key itself, not a reference to it."),
    ] = False,
) -> None:
    """Start a client, or print its settings.

    If no server answers, one is started for as long as the client runs.
    """
    if client not in CLIENTS:
        raise BadInput(f"{client!r} is not a known client; use one of {', '.join(CLIENTS)}.")
    settings = config.load(model=model)
    key, address = _key(settings), _checked(url or _address(settings))
    told = ServerInfo(address, "", 1, agent=_checked_agent(agent))
    program = "" if only_print else _program([*CLIENTS[client](told).command, *(arguments or ())])
    may_start = program and url is None and not _listens(address)
    with _started(settings, model, address) if may_start else nullcontext():
        server = replace(_served(address, key), agent=told.agent)
        setup = CLIENTS[client](server)
        for warning in setup.warnings(server):
            print(warning, file=sys.stderr)
        command = [*setup.command, *(arguments or ())]
        if program:
            sys.exit(_run(setup, program, command))
    print("\n".join(setup.shell_lines(command, None if show_key else key.shell)))


def _address(settings: config.Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"{url!r} is not a server URL; write it like http://127.0.0.1:8181.")
    return url.rstrip("/").removesuffix("/v1")


def _checked_agent(agent: str | None) -> str:
    from keepwarm.server.http.request_fields import checked_agent_id

    return checked_agent_id(agent) if agent else ""


def _key(settings: config.Settings) -> Key:
    """The key to send: from the client's variable, else the first that a local server accepts."""
    if value := os.environ.get(KEY_VARIABLE):
        return Key(value, f'"${KEY_VARIABLE}"')
    keys = settings.read_api_keys()
    if not keys:
        return Key(NO_KEY, NO_KEY)
    return Key(keys[0], f'"{first_key(settings)}"')


def _served(url: str, key: Key) -> ServerInfo:
    """The server's model and context length."""
    asked = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key.value}"})  # noqa: S310
    try:
        with urlopen(asked, timeout=TIMEOUT_S) as answer:  # noqa: S310 - http and https alone
            model = json.load(answer)["data"][0]
            return ServerInfo(url, str(model["id"]), int(model["context_length"]), key.value)
    except HTTPError as error:
        error.close()
        if error.code == 401:
            raise Refused(f"The server at {url} rejects this key; set {KEY_VARIABLE}.") from error
        raise Unreachable(
            f"The server at {url} returned status {error.code}; check its log."
        ) from error
    except (OSError, HTTPException) as error:
        raise Unreachable(
            f"No server answers at {url}; start one with `keepwarm serve`, or pass --url."
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Unreachable(f"The server at {url} is not Keepwarm; pass another --url.") from error


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), TIMEOUT_S).close()
    except OSError:
        return False
    return True


@contextmanager
def _started(settings: config.Settings, model: str | None, url: str) -> Iterator[None]:
    """A server of the settings, until the client has ended. The screen is the client's, so what
    the server prints is kept for the case that it does not start."""
    name = _chosen(settings, model, url)
    command = [sys.executable, "-m", "keepwarm", "serve", "--model", name]
    with TemporaryFile() as log:
        # The terminal's Ctrl-C is for the client alone.
        server = Popen(command, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            with shown(f"starting a server with {name}", at_once=True):
                _wait_for(server, url, log)
            yield
        finally:
            server.terminate()
            server.wait()


def _wait_for(server: Popen[bytes], url: str, log: IO[bytes]) -> None:
    while not _is_ready(url):
        if server.poll() is not None:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines()
            raise Unreachable(f"The server did not start: {said[-1] if said else 'no reason'}")
        time.sleep(POLL_S)


def _is_ready(url: str) -> bool:
    with suppress(OSError, HTTPException), urlopen(f"{url}/health", timeout=TIMEOUT_S):  # noqa: S310
        return True
    return False


def _chosen(settings: config.Settings, model: str | None, url: str) -> str:
    """The model that is named, else the largest that fits, downloaded after a question."""
    from keepwarm.cli.models import fitting_here
    from keepwarm.models.catalog import find, locate

    if model or settings.model != config.Settings.model:
        return settings.model
    best = next(iter(fitting_here()), None)
    if best is None:
        return settings.model
    if find(best.id, settings) is None:
        if not sys.stdin.isatty():
            raise Unreachable(
                f"No server answers at {url}; start one with `keepwarm serve`, or name a model "
                "with --model."
            )
        size = format_bytes(best.weights_bytes)
        question = f"No server answers at {url}. Download {best.id} ({size}) and serve it?"
        typer.confirm(question, default=True, abort=True, err=True)
        locate(best.id, settings)
    return best.id


def _program(command: list[str]) -> str:
    if not command:
        raise BadInput("No command to start; write it after --.")
    program = shutil.which(command[0])
    if program is None:
        raise BadInput(f"{command[0]} is not installed, or not on the PATH; install it first.")
    return program


def _run(setup: ClientSetup, program: str, command: list[str]) -> int:
    """Start the client, with its files; its status."""
    inherited = {name: value for name, value in os.environ.items() if name not in setup.cleared}
    environ = {**inherited, **setup.environ, **setup.secrets}
    with TemporaryDirectory(prefix="keepwarm-") as folder:
        for name, text in setup.files.items():
            path = Path(folder, f"{name}.json")
            path.write_text(text)
            environ[name] = str(path)
        return _wait(program, command, environ)


def _wait(program: str, command: list[str], environ: Mapping[str, str]) -> int:
    """Run the client; its status as a shell has it. Signals are for the client to act on."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    client = os.posix_spawn(program, command, environ, setsigmask=before)
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to both
    for each in signals[1:]:
        signal.signal(each, lambda number, _: os.kill(client, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status = os.waitstatus_to_exitcode(os.waitpid(client, 0)[1])
    return status if status >= 0 else 128 - status
