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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import IO, Annotated, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import typer

from keepwarm import config
from keepwarm.cli.options import file_errors, first_key, locate_model
from keepwarm.errors import BadInput, Refused, UnknownModel, Unreachable
from keepwarm.progress import shown
from keepwarm.server.http.clients import CLIENTS, KEY_VARIABLE, NO_KEY, ClientSetup, ServerInfo
from keepwarm.units import format_bytes

TIMEOUT_S = 10
POLL_S = 0.1
STOP_S = 30.0  # for a server to end after its last answer
GREETING = b"Serving "


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
            "--model", help="Model of a server that it starts; default the largest that fits."
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
    blank = CLIENTS[client](told)
    program = "" if only_print else _program([*blank.command, *(arguments or ())])
    may_start = bool(program) and url is None and not _listens(address)
    for option in _unused(may_start, model, only_print, show_key):
        print(f"Warning: {option}", file=sys.stderr)
    with ExitStack() as until_end:
        if may_start:
            named = _model_options(settings, model, blank.first_prompt, address)
            until_end.enter_context(_started(settings, named))
        server = replace(_served(address, key, None if url else {}), agent=told.agent)
        setup = CLIENTS[client](server)
        for warning in setup.warnings(server):
            print(warning, file=sys.stderr)
        command = [*setup.command, *(arguments or ())]
        if program:
            sys.exit(_run(setup, program, command))
    print("\n".join(setup.shell_lines(command, None if show_key else key.shell)))


def _unused(starts: bool, model: str | None, prints: bool, show_key: bool) -> Iterator[str]:
    """Options that change nothing here."""
    if model and not starts:
        yield "--model is for a server that is started; this one keeps its model."
    if show_key and not prints:
        yield "--show-key is for --print."


def _address(settings: config.Settings) -> str:
    if not settings.port:
        raise BadInput("Port 0 is any free port, which no client can know; set another.")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _checked(url: str) -> str:
    with suppress(ValueError):  # of an address or a port that is none
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/").removesuffix("/v1")
    raise BadInput(f"{url!r} is not a server URL; write it like http://127.0.0.1:8181.")


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


def _served(url: str, key: Key, proxies: dict[str, str] | None) -> ServerInfo:
    """The server's model and context length; proxies of the environment if they are None."""
    asked = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key.value}"})  # noqa: S310
    try:
        with build_opener(ProxyHandler(proxies)).open(asked, timeout=TIMEOUT_S) as answer:
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
def _started(settings: config.Settings, named: list[str]) -> Iterator[None]:
    """A server of the settings, until the client has ended. The screen is the client's, so what
    the server prints goes to a file."""
    command = [sys.executable, "-m", "keepwarm", "serve", *named]
    path = settings.home / f"launch-{settings.port}.log"  # each server has its own port
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_DFL:  # which would leave the server behind
            signal.signal(number, signal.getsignal(signal.SIGTERM))
    with _new_log(path) as log:
        # The terminal's Ctrl-C is for the client alone.
        server = Popen(command, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            with shown("starting a server") as line:
                line.say("loading the model")
                _wait_for(server, log)
            try:
                yield
            finally:
                if server.poll() is not None:
                    print(f"The server ended: {_last_line(log)} ({path})", file=sys.stderr)
        finally:
            with shown("stopping the server") as line:
                line.say("it ends its answers")
                _stop(server, settings.drain_s)


def _new_log(path: Path) -> IO[bytes]:
    with file_errors(path, "written", "set KEEPWARM_HOME to another directory"):
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("a+b")
        log.truncate(0)
    return log


def _wait_for(server: Popen[bytes], log: IO[bytes]) -> None:
    """Until it greets: another program may answer at its address."""
    while not any(line.startswith(GREETING) for line in _lines(log)):
        if server.poll() is not None:
            raise Unreachable(f"The server did not start: {_last_line(log)}")
        time.sleep(POLL_S)


def _lines(log: IO[bytes]) -> list[bytes]:
    log.seek(0)
    return log.readlines()


def _last_line(log: IO[bytes]) -> str:
    lines = _lines(log) or [b"no reason"]
    return lines[-1].decode(errors="replace").strip()


def _stop(server: Popen[bytes], drain_s: float) -> None:
    server.terminate()
    try:
        server.wait(drain_s + STOP_S)
    except TimeoutExpired:
        server.kill()


def _model_options(
    settings: config.Settings, model: str | None, first_prompt: int, url: str
) -> list[str]:
    """What tells a server its model, unless the settings do. Downloads it, where that is seen."""
    chosen = model
    if not model and not config.is_given("model"):
        chosen = _chosen(settings, first_prompt, url)
    with suppress(UnknownModel):  # of which the server says more
        locate_model(chosen or settings.model, settings)
    return ["--model", chosen] if chosen else []


def _chosen(settings: config.Settings, first_prompt: int, url: str) -> str:
    """The largest model that fits with the client's first prompt and an answer; asks before it is
    downloaded."""
    from keepwarm.models.catalog import find
    from keepwarm.models.choices import ModelMemory, all_choices

    best = next(iter(ModelMemory.here().fitting(first_prompt * 4 // 3)), None)
    if best and find(best.id, settings):
        return best.id
    if best is None or not sys.stdin.isatty():
        raise Unreachable(
            f"No server answers at {url}; start one with `keepwarm serve`, or name a model "
            "with --model."
        )
    size = next(format_bytes(each.weights_bytes) for each in all_choices() if each.id == best.id)
    about = size if best.is_loaded else f"{size}, not tried by us"
    question = f"No server answers at {url}. Download {best.id} ({about}) and serve it?"
    typer.confirm(question, default=True, abort=True, err=True)
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
    """Run the client; its status as a shell has it. Signals are for the client to act on: those of
    a terminal reach it anyway, others are forwarded."""
    forwarded = (signal.SIGTERM, signal.SIGHUP)
    heard = (*forwarded, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD)
    usual = {each: signal.getsignal(each) for each in heard}
    for number in (*forwarded, signal.SIGINT, signal.SIGQUIT):
        if usual[number] == signal.SIG_IGN:  # and stays so, for the client as well
            del usual[number]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)  # gets the number of each signal
    for number in usual:  # before the client starts: blocking them binds no library's thread
        signal.signal(number, lambda *_: None)
    try:
        client = _spawned(program, command, environ)
        while not (ended := os.waitpid(client, os.WNOHANG))[0]:
            for told in set(os.read(reader, 64)).intersection(forwarded):
                os.kill(client, told)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in usual.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
    status = os.waitstatus_to_exitcode(ended[1])
    return status if status >= 0 else 128 - status


def _spawned(program: str, command: list[str], environ: Mapping[str, str]) -> int:
    """The client's process id."""
    try:
        return os.posix_spawn(program, command, environ)
    except OSError as error:
        raise BadInput(
            f"{program} cannot be started: {error.strerror}; install it again."
        ) from error
