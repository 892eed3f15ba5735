"""What every API says about one prompt, and the keys of everything that can be asked of a server.

Somebody's script reads these: a key may be added, and none may go before its release is over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepwarm import config
from tests.golden.scenario import AGENT, NEXT, SYSTEM, USER
from tests.server.conftest import Live, serve

EXPLAIN = {"keepwarm": {"explain": True}}
SAID = [SYSTEM, USER]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 4},
    "/v1/completions": {"prompt": SYSTEM["content"], "max_tokens": 4},
    "/v1/responses": {"input": SAID, "max_output_tokens": 4},
    "/v1/messages": {"system": SYSTEM["content"], "messages": [USER], "max_tokens": 4},
}
TIMED = ("saved_ms", "phases_ms")
METRIC = re.compile(r"^(keepwarm_\w+)", re.MULTILINE)


def shapes(model: Any, home: Path) -> dict[str, Any]:
    with serve(model, config.load({"KEEPWARM_HOME": str(home)})) as live:
        answers = {path: answer(live, path, body) for path, body in BODIES.items()}
        live.post("/v1/chat/completions", {"messages": [SYSTEM, NEXT], "max_tokens": 4})
        live.host.engine.wait_until_saved()
        return {
            "receipts": {path: receipt for path, (receipt, _) in answers.items()},
            "answer keys": {path: keys for path, (_, keys) in answers.items()},
            "get": {path: sorted(set(keys_of(live.get(path).json()))) for path in readable(live)},
            "metrics": sorted(set(METRIC.findall(live.get("/metrics").text))),
            "openapi": operations(live),
        }


def answer(live: Live, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    said = live.post(path, body | EXPLAIN, **{"X-Keepwarm-Agent": AGENT})
    assert said.status_code == 200, said.text
    whole = said.json()
    receipt = {key: value for key, value in whole["keepwarm"].items() if key not in TIMED}
    return receipt, sorted(set(keys_of(whole)))


def readable(live: Live) -> list[str]:
    """Everything that a plain GET answers with JSON."""
    paths = live.get("/openapi.json").json()["paths"]
    plain = [path.replace("{agent_id}", AGENT) for path, verbs in paths.items() if "get" in verbs]
    plain = [path for path in plain if "{" not in path]
    return sorted(p for p in plain if "json" in live.get(p).headers.get("content-type", ""))


def operations(live: Live) -> list[str]:
    paths = live.get("/openapi.json").json()["paths"]
    return sorted(f"{verb} {path}" for path, verbs in paths.items() for verb in verbs)


def keys_of(value: Any, before: str = "") -> Iterator[str]:
    """Dotted keys of nested JSON; items of a list share one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{before}{key}"
            yield from keys_of(inner, f"{before}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, f"{before}[].")
