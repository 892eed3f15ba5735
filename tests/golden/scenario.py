"""Fixed requests to fixed models, and everything about their answers that must not change.

The weights are files, so namespaces, keys and tokens are the same on every machine. Timings are
left out. `python -m tests.golden.record` writes what the running code gives to tests/data/golden.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import keepwarm
from keepwarm import config
from keepwarm.cache.store import Budgets, Store
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.engine import Engine
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import KVOptions, Request, Sampling
from tests.kit.engines import FixedRates, memory

DATA = Path(__file__).parents[1] / "data" / "golden"
ARCHITECTURES = ("llama", "gemma3_text", "qwen3_next")
# Fields of receipts that are younger than the golden files.
NEWER = (
    *("continued", "reordered", "repeated_calls", "unread", "scored", "ignored_fields", "shared"),
    "phases_ms",
    "speculation",
    "lossy_tokens",
)
SECRET = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="  # bytes 0 to 31
AGENT = "golden"
N_ANSWER = 12

RULES = "You answer what the user asked, in the words of the document which hold the answer. "
SYSTEM = {"role": "system", "content": RULES * 10}
USER = {"role": "user", "content": "What is the answer to the question of the other dog?"}
OTHER = {"role": "user", "content": "Which months of 1984 had 31 days?"}
NEXT = {"role": "user", "content": "And the lazy dog under the tree?"}


def load(architecture: str) -> Any:
    return keepwarm.load(str(DATA / "models" / architecture), config.load({}, home=None))


@contextmanager
def engine_on(model: Any, home: Path, secret: str = "") -> Iterator[Engine]:
    named = {"KEEPWARM_HOME": str(home)} | ({"KEEPWARM_ENCRYPTION_KEY": secret} if secret else {})
    settings = config.load(named)
    with (
        Store(budgets=Budgets(min_free_disk_bytes=0), settings=settings) as store,
        Engine(model, store, EngineConfig(memory=memory()), settings=settings) as engine,
    ):
        lane = engine.lane_of()
        lane.restorer.rates = FixedRates()
        yield engine


def request(*messages: dict[str, str], **options: Any) -> Request:
    sampling = Sampling(max_tokens=N_ANSWER, temperature=0)
    return Request(messages=messages, sampling=sampling, agent=AGENT, explain=True, **options)


def ask(engine: Engine, wanted: Request) -> dict[str, Any]:
    """The tokens and the receipt of one answer, once everything it computed is kept."""
    result = engine.submit(wanted).result()
    engine.wait_until_saved()
    receipt = asdict(result.receipt) | {"exact": result.receipt.exact}
    receipt = {k: v for k, v in receipt.items() if k not in ("saved_ms", "inexact", *NEWER)}
    return {
        "tokens": [[info.token for info in choice.tokens] for choice in result.choices],
        "receipt": json.loads(json.dumps(receipt)),
        "text": result.choices[0].text,
    }


def answered(answer: dict[str, Any]) -> dict[str, str]:
    return {"role": "assistant", "content": answer["text"]}


def play(architecture: str, home: Path) -> dict[str, Any]:
    """A conversation of three turns with a restart, beside requests of every policy."""
    model, seen = load(architecture), {}
    with engine_on(model, home) as engine:
        seen["cold"] = ask(engine, request(SYSTEM, USER))
        seen["again"] = ask(engine, request(SYSTEM, USER))
        turn = (SYSTEM, USER, answered(seen["cold"]), NEXT)
        seen["second turn"] = ask(engine, request(*turn))
        seen["other question"] = ask(engine, replace(request(SYSTEM, OTHER), agent="other"))
    with engine_on(model, home) as engine:
        seen["restarted"] = ask(engine, request(*turn))
        third = (*turn, answered(seen["second turn"]), OTHER)
        seen["third turn"] = ask(engine, request(*third))
        seen["two choices"] = ask(engine, request(SYSTEM, NEXT, n=2))
        for policy in (Policy.READ_ONLY, Policy.EPHEMERAL, Policy.NO_STORE, Policy.DURABLE):
            wanted = request(SYSTEM, USER, NEXT, policy=policy)
            seen[policy.value] = ask(engine, wanted)
        if architecture == "llama":
            quantised = request(SYSTEM, USER, kv=KVOptions(kv_bits=8, kv_group_size=32))
            seen["quantised"] = ask(engine, quantised)
    return {"answers": seen, "records": records(home / "store")}


def records(store: Path) -> dict[str, str]:
    """Every record file by name: a digest of its header, without the digests of its numbers."""
    return {str(p.relative_to(store)): header_digest(p) for p in sorted(store.glob("blocks/*/*"))}


def header_digest(path: Path) -> str:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    about = header.pop("__metadata__")
    kept = json.loads(about["keepwarm"])
    kept["digests"] = sorted(kept["digests"])
    text = json.dumps([kept, sorted(about), header], sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]
