"""From digests to a namespace: two caches share blocks only if everything here is equal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace

NAMESPACE_BYTES = 32
FORMAT_VERSION = 1


_QUANTIZED_FROM = re.compile(r" exact to \d+$")


def salt_of(tenant: str, quantized_from: int) -> str:
    """Separates blocks by tenant, and by the token from which on rows are quantised."""
    return f"{tenant} exact to {quantized_from}" if quantized_from else tenant


def tenant_of(salt: str) -> str:
    return _QUANTIZED_FROM.sub("", salt)


@dataclass(frozen=True)
class Identity:
    """Everything that changes the numbers in a cache. Digests are hex strings."""

    weights: Mapping[str, str]  # content digest by file
    config: str
    tokenizer: str
    layout: str  # layer kinds, classes, shapes and dtypes
    adapter: str = ""
    kv_options: Mapping[str, Any] = field(default_factory=dict)  # bits, group size, start, max size
    salt: str = ""  # one tenant cannot probe another's prompts
    block_tokens: int = BLOCK_TOKENS
    format_version: int = FORMAT_VERSION
    origin: str = ""  # the import that the blocks came with: they are whatever a stranger wrote

    def to_json(self) -> dict[str, Any]:
        """Without an empty origin, so that what was computed here keeps the names it always had."""
        fields = asdict(self)
        return fields if self.origin else {n: v for n, v in fields.items() if n != "origin"}


def namespace(identity: Identity) -> Namespace:
    """Stable across processes, machines and Python versions."""
    return Namespace(bytes.fromhex(digest(identity.to_json(), NAMESPACE_BYTES)))


def digest(value: Any, n_bytes: int = 16) -> str:
    """A digest of plain data by its canonical JSON, as a hex string."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return blake2b(text.encode(), digest_size=n_bytes, person=b"keepwarm.name.1").hexdigest()
