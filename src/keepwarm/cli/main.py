"""The `keepwarm` command. A KeepwarmError, or a wrong option, is one sentence with exit code 2.

The verbs import MLX inside their functions, so that `--help` is fast, and a verb that is called is
imported alone.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer

from keepwarm import __version__, config
from keepwarm.errors import KeepwarmError

VERBS = (
    "run",
    "chat",
    "serve",
    "launch",
    "pull",
    "models",
    "doctor",
    "cache",
    "remote",
)


def command_line(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """The command with these verbs: a tenth of a second for all of them."""
    app = typer.Typer(
        name="keepwarm",
        help="Serve local LLMs without computing the same prompt twice.",
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"max_content_width": 80},
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for verb in verbs:
        module = import_module(f"keepwarm.cli.{verb}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=verb)
        else:
            app.command()(getattr(module, verb))
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


INTERRUPTED = 128 + signal.SIGINT  # what typer makes of Ctrl-C
NUMBERS = {"int_parsing": "a whole number", "float_parsing": "a number"}
HABITS = {  # commands of other programs
    "list": "`keepwarm models` lists the models on this machine",
    "ps": "the dashboard and `GET /api/ps` show what is loaded",
    "demo": "run `make demo` in a checkout",
    "rm": "`keepwarm cache rm` deletes an agent; a model is the path that `keepwarm models` shows",
    "stop": "end `keepwarm serve` with Ctrl-C; the dashboard unloads a model",
    "show": "`keepwarm models` shows models, `keepwarm cache show` an agent",
    "help": "use `keepwarm --help`",
}
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
UsageError: Any = typer.BadParameter.__base__  # typer exports only its subclasses


def main() -> None:
    """Run the command line."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character the terminal cannot encode is printed as a question mark, not an error.
        sys.stdout.reconfigure(errors="replace")
    for sentence in config.unknown_variables(os.environ):
        typer.echo(sentence, err=True)
    try:
        called = [verb for verb in sys.argv[1:2] if verb in VERBS]
        app = command_line(called or VERBS)
        with _unwound_by_signals():
            code = app(prog_name="keepwarm", standalone_mode=False)
        if code == INTERRUPTED:
            typer.echo("Stopped.", err=True)
        sys.stdout.flush()
        sys.exit(code)
    except KeepwarmError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
    except UsageError as error:
        typer.echo(_sentence(error), err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes there
        typer.echo(f"The output cannot be written ({error.strerror}).", err=True)
        sys.exit(2)
    except typer.Abort:
        typer.echo("Stopped.", err=True)
        sys.exit(1)


def _open_closed_streams() -> None:
    """Each as an empty one, and first of all: a file opened later would be taken for it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C unwind the verb, which removes what is half written; `serve` drains."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if before[signal.SIGINT] is signal.SIG_DFL:  # as `keepwarm.__main__` left it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:  # while typer still reads the arguments
        sys.exit(INTERRUPTED)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _sentence(error: Any) -> str:
    """A wrong command, option or argument, and where to read more; without one, all commands."""
    message = _wrong_number(error) or " ".join(error.format_message().split()).rstrip(".")
    if error.ctx is None:
        return f"{message}."
    if not message or "help" in type(error).__name__.lower():
        return str(error.ctx.get_help())
    if not error.ctx.parent and (said := HABITS.get(_unknown_command(message))):
        return f"No such command; {said}."
    end = " See" if message.endswith("?") else "; see"
    return f"{message}{end} `{error.ctx.command_path} --help`."


def _unknown_command(message: str) -> str:
    found = re.match(r"No such command '([^']*)'", message)
    return found[1] if found else ""


def _wrong_number(error: Any) -> str:
    """In our words, where typer would repeat pydantic's; empty if something else is wrong."""
    problems: list[Any] = getattr(error.__cause__, "errors", list)()
    wanted = NUMBERS.get(problems[0]["type"]) if problems else None
    if wanted is None:
        return ""
    kind, name = error.param.param_type_name, error.param.opts[0]
    return f"The {kind} {name} takes {wanted}, not {problems[0]['input']!r}"
