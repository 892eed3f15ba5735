"""`keepwarm serve`: the HTTP server."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keepwarm import backend, config
from keepwarm.cli.options import first_key

if TYPE_CHECKING:
    from fastapi import FastAPI

    from keepwarm.config import Settings

SHORT_KEY = 16  # characters; a shorter one can be guessed
RARELY = (1_000_000, 10, 10)  # objects made between two garbage collections, while starting
# The shell writes the numbers: a prompt that is long enough to see what is reused of it.
EXAMPLE = (
    '{"messages": [{"role": "user", "content": "Add these: \'"$(seq -s " " 300)"\'"}], '
    '"max_tokens": 32}'
)


def serve(
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Model, or name=model; repeat it for several. The first is the default.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address to listen on; if not local, API keys are required."),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Port to listen on; 0 picks a free one.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="File of accepted API keys, or of `name = key` lines."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Context window in tokens, if shorter than the model's."),
    ] = None,
    kv_bits: Annotated[
        int | None,
        typer.Option("--kv-bits", help="Quantise keys and values to 2, 4 or 8 bits; 0: off."),
    ] = None,
    kv_group_size: Annotated[
        int | None, typer.Option("--kv-group-size", help="Group size of the quantisation.")
    ] = None,
    quantized_kv_start: Annotated[
        int | None,
        typer.Option("--quantized-kv-start", help="Tokens before this one are not quantised."),
    ] = None,
    max_kv_size: Annotated[
        int | None,
        typer.Option("--max-kv-size", help="Keep only the last N tokens; 0: no limit."),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="debug, info, warning or error.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", help="text, or json: one object per line.")
    ] = None,
) -> None:
    """Serve the OpenAI, Anthropic and Ollama APIs until stopped."""
    given = locals()
    if (file := given.pop("api_key_file")) is not None:
        given["api_keys"] = f"{config.FROM_FILE}{file}"
    if model:
        given |= {"model": model[0], "more_models": ",".join(model[1:])}
    _serve(config.load(**given))


def _serve(settings: Settings) -> None:
    usual = gc.get_threshold()
    backend.leave_out_torch()
    gc.set_threshold(*RARELY)  # what is imported and loaded stays; traversing it takes time
    from keepwarm.server.http.limits import check_binding
    from keepwarm.server.models.models import check_models
    from keepwarm.server.process import address_of, bind
    from keepwarm.server.process import serve as serve_app

    check_binding(settings)
    check_models(settings)
    with bind(settings.host, settings.port) as listening:
        from keepwarm.cache.store import Store
        from keepwarm.server.models.models import Models

        with Store(settings=settings) as store:
            models = Models.of(settings, store)

            def start() -> None:
                models.start()
                gc.freeze()
                gc.set_threshold(*usual)

            def greet() -> None:
                names = ", ".join(name for slot in models.slots.all for name in slot.names)
                print(_greeting(settings, names, address_of(listening)), flush=True)
                if warning := short_key_warning(settings):
                    print(warning, file=sys.stderr, flush=True)

            def make_app() -> FastAPI:
                from keepwarm.server.app import create_app

                return create_app(models, settings)

            serve_app(make_app, settings, listening, start, greet)


def _greeting(settings: Settings, names: str, address: str) -> str:
    """What was started and what to do next; no address touches a bracket, a comma or a stop."""
    return (
        f"Serving {names} at {address}/v1\n"
        f"Dashboard: {address}/dashboard\n"
        f"Endpoints: {address}/docs\n"
        f"Clients: keepwarm launch claude --url {address} (or {', '.join(_other_clients())})\n"
        f"Send this twice; then stop the server with Ctrl-C, start it again and send it once more. "
        f"The answer's cached_tokens says what was reused.\n"
        f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'"
        f"{_key(settings)} -d '{EXAMPLE}'"
    )


def short_key_warning(settings: Settings) -> str:
    """Where other machines reach the server; empty if no key is short."""
    from keepwarm.server.http.limits import is_loopback

    shortest = min(map(len, settings.read_api_keys()), default=SHORT_KEY)
    if is_loopback(settings.host) or shortest >= SHORT_KEY:
        return ""
    return (
        f"Warning: other machines reach this server, and an API key has fewer than {SHORT_KEY} "
        "characters; use long random keys."
    )


def _other_clients() -> list[str]:
    from keepwarm.server.http.clients import CLIENTS

    return [name for name in CLIENTS if name != "claude"]


def _key(settings: Settings) -> str:
    """A header that makes the shell insert the key, so that the screen does not show it."""
    if not settings.api_keys:
        return ""
    return f' -H "Authorization: Bearer {first_key(settings)}"'
