"""`keepwarm launch`: print a coding agent's settings for this server, or start it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple, NoReturn
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer

from keepwarm import config
from keepwarm.cli.options import first_key
from keepwarm.errors import BadInput, Refused, Unreachable
from keepwarm.server.http.clients import CLIENTS, KEY_VARIABLE, NO_KEY, ClientSetup, ServerInfo

TIMEOUT_S = 10


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
    agent: Annotated[
        str | None,
        typer.Option("--agent", help="Agent id for everything that the client sends."),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run/--print", help="Start the client, or print its settings.")
    ] = False,
    show_key: Annotated[
        bool,
        typer.Option("--show-key", help="Print the key itself, not a reference to it."),
    ] = False,
) -> None:
    """Print a client's settings, or start it."""
    if client not in CLIENTS:
        raise BadInput(f"{client!r} is not a known client; use one of {', '.join(CLIENTS)}.")
    settings = config.load()
    key = _key(settings)
    server = _served(_checked(url or _address(settings)), key)
    setup = CLIENTS[client](replace(server, agent=_checked_agent(agent)))
    for warning in setup.warnings(server):
        print(warning, file=sys.stderr)
    command = [*setup.command, *(arguments or ())]
    if run:
        _start(setup, command)
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


def _start(setup: ClientSetup, command: list[str]) -> NoReturn:
    """Replace this process by the client, or wait for a client that needs files."""
    if not command:
        raise BadInput("No command to start; write it after --.")
    program = shutil.which(command[0])
    if program is None:
        raise BadInput(f"{command[0]} is not installed, or not on the PATH; install it first.")
    inherited = {name: value for name, value in os.environ.items() if name not in setup.cleared}
    environ = {**inherited, **setup.environ, **setup.secrets}
    if not setup.files:
        os.execve(program, command, environ)  # noqa: S606
    with TemporaryDirectory(prefix="keepwarm-") as folder:
        for name, text in setup.files.items():
            path = Path(folder, f"{name}.json")
            path.write_text(text)
            environ[name] = str(path)
        sys.exit(_wait(program, command, environ))


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
