"""The `keepwarm` command. A KeepwarmError, or a wrong option, is one sentence with exit code 2.

The verbs import MLX inside their functions, so that `--help` is fast.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Annotated, Any

import typer

from keepwarm import __version__, config
from keepwarm.cli import cache
from keepwarm.cli.bench import bench
from keepwarm.cli.chat import chat
from keepwarm.cli.demo import demo
from keepwarm.cli.doctor import doctor
from keepwarm.cli.launch import launch
from keepwarm.cli.models import models
from keepwarm.cli.pull import pull
from keepwarm.cli.run import run
from keepwarm.cli.serve import serve
from keepwarm.errors import KeepwarmError

app = typer.Typer(
    name="keepwarm",
    help="Local LLM agents that never compute the same prompt twice.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"max_content_width": 80},
    pretty_exceptions_enable=False,
)
for command in (run, chat, serve, launch, pull, models, doctor, bench, demo):
    app.command()(command)
app.add_typer(cache.app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
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
