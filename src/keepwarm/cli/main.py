"""The `keepwarm` command. A KeepwarmError, or a wrong option, is one sentence with exit code 2.

The verbs import MLX inside their functions, so that `--help` is fast, and a verb that is called is
imported alone.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
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
    "bench",
    "demo",
    "cache",
)


def command_line(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """The command with these verbs: a tenth of a second for all of them."""
    app = typer.Typer(
        name="keepwarm",
        help="Local LLM agents that never compute the same prompt twice.",
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


UsageError: Any = typer.BadParameter.__base__  # typer exports only its subclasses


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character the terminal cannot encode is printed as a question mark, not an error.
        sys.stdout.reconfigure(errors="replace")
    for sentence in config.unknown_variables(os.environ):
        typer.echo(sentence, err=True)
    # So that what is half written is removed; `serve` drains instead.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        called = [verb for verb in sys.argv[1:2] if verb in VERBS]
        app = command_line(called or VERBS)
        sys.exit(app(prog_name="keepwarm", standalone_mode=False))
    except KeepwarmError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
    except UsageError as error:
        typer.echo(_sentence(error), err=True)
        sys.exit(2)
    except typer.Abort:
        typer.echo("Stopped.", err=True)
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)


def _sentence(error: Any) -> str:
    """A wrong command, option or argument, and where to read more; without one, all commands."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if error.ctx is None:
        return f"{message}."
    if not message or "help" in type(error).__name__.lower():
        return str(error.ctx.get_help())
    end = " See" if message.endswith("?") else "; see"
    return f"{message}{end} `{error.ctx.command_path} --help`."
