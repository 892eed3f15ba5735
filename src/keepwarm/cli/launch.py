"""`keepwarm launch`: point a coding agent at the server, and start it if wanted."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from http.client import HTTPException
from typing import Annotated, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer

from keepwarm import config
from keepwarm.errors import BadInput, Refused, Unreachable
from keepwarm.server.clients import CLIENTS, KEY_VARIABLE, NO_KEY, ClientSetup, ServerInfo

TIMEOUT_S = 10


class Key(NamedTuple):
    value: str
    shell: str  # what a shell puts the value in for


def launch(
    client: Annotated[str, typer.Argument(help=f"One of {', '.join(CLIENTS)}.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Handed to the client; put them after --.")
    ] = None,
    *,
    url: Annotated[
        str | None, typer.Option("--url", help="Where the server is, if not where settings say.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run/--print", help="Start the client, or print how to.")
    ] = False,
    show_key: Annotated[
        bool, typer.Option("--show-key", help="Print the key itself, not where it is from.")
    ] = False,
) -> None:
    """Say how a client is pointed at the running server, or start it so."""
    if client not in CLIENTS:
        raise BadInput(f"{client!r} is no client known here; use one of {', '.join(CLIENTS)}.")
    settings = config.load()
    key = _key(settings)
    setup = CLIENTS[client](_served(_checked(url or _address(settings)), key))
    command = [*setup.command, *(arguments or ())]
    if run:
        _start(setup, command)
    print("\n".join(_lines(setup, command, None if show_key else key)))


def _address(settings: config.Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"{url!r} is no address of a server; write it as http://127.0.0.1:8181.")
    return url.rstrip("/").removesuffix("/v1")


def _key(settings: config.Settings) -> Key:
    """The key to send: the client's own variable first, then what a server here would accept."""
    if mine := os.environ.get(KEY_VARIABLE):
        return Key(mine, f'"${KEY_VARIABLE}"')
    keys = settings.read_api_keys()
    if not keys:
        return Key(NO_KEY, NO_KEY)
    if settings.api_keys:
        return Key(keys[0], '"${KEEPWARM_API_KEYS%%,*}"')
    return Key(keys[0], f'"$(head -n 1 {shlex.quote(settings.api_key_file)})"')


def _served(url: str, key: Key) -> ServerInfo:
    """The model that the server has, and how much it reads."""
    asked = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key.value}"})  # noqa: S310
    try:
        with urlopen(asked, timeout=TIMEOUT_S) as answer:  # noqa: S310 - http and https alone
            model = json.load(answer)["data"][0]
            return ServerInfo(url, str(model["id"]), int(model["context_length"]), key.value)
    except HTTPError as error:
        error.close()
        if error.code == 401:
            raise Refused(f"The server at {url} wants another key; set {KEY_VARIABLE}.") from error
        raise Unreachable(f"The server at {url} answers {error.code}; look at its log.") from error
    except (OSError, HTTPException) as error:
        raise Unreachable(
            f"No server answers at {url}; start one with `keepwarm serve`, or give its --url."
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Unreachable(f"What answers at {url} is not Keepwarm; give its --url.") from error


def _start(setup: ClientSetup, command: list[str]) -> None:
    """Become the client. Returns never."""
    if not command:
        raise BadInput("There is nothing to start; write the command after --.")
    program = shutil.which(command[0])
    if program is None:
        raise BadInput(f"{command[0]} is not installed, or not on the PATH; install it first.")
    kept = {name: value for name, value in os.environ.items() if name not in setup.cleared}
    os.execve(program, command, {**kept, **setup.environ, **setup.secrets})  # noqa: S606


def _lines(setup: ClientSetup, command: list[str], hidden: Key | None) -> list[str]:
    """Lines for a shell; a hidden key stands there as the place it comes from."""
    unset = [f"unset {' '.join(setup.cleared)}"] if setup.cleared else []
    plain = [f"export {name}={shlex.quote(value)}" for name, value in setup.environ.items()]
    secret = [
        f"export {name}={hidden.shell if hidden else shlex.quote(value)}"
        for name, value in setup.secrets.items()
    ]
    return [*unset, *plain, *secret, *([shlex.join(command)] if command else [])]
