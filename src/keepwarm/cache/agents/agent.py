"""One named conversation, as its file has it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from keepwarm.cache.agents.holders import AgentBlock
from keepwarm.errors import NewerFormat
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, root

VERSION = 2  # version 1 had no `left`


@dataclass(frozen=True)
class Agent:
    id: str
    namespace: Namespace
    blocks: tuple[BlockKey, ...] = ()  # from the first token on; the last may be open
    n_tokens: int = 0
    turns: tuple[int, ...] = ()  # where each turn ended, in tokens
    pinned: bool = False
    quota_bytes: int | None = None  # its first blocks, up to this size, are not evicted
    retention_s: float | None = None  # deleted when unused for longer
    created: float = 0.0
    used: float = 0.0
    forked_from: str = ""
    left: tuple[AgentBlock, ...] = ()  # abandoned by a rewind or an edit, while they exist

    @property
    def sized_blocks(self) -> list[AgentBlock]:
        """Its blocks, with sizes. After a rewind the last may be longer than the agent's part."""
        longer = {block.key: block for block in self.left}
        parents = (root(self.namespace), *self.blocks)
        sizes = (self.n_tokens - n * BLOCK_TOKENS for n in range(len(self.blocks)))
        return [
            longer.get(key) or AgentBlock(key, parent, min(n_tokens, BLOCK_TOKENS))
            for key, parent, n_tokens in zip(self.blocks, parents, sizes, strict=False)
        ]

    def to_json(self) -> str:
        fields = (
            {"version": VERSION}
            | asdict(self)
            | {
                "namespace": self.namespace.hex(),
                "blocks": [key.hex() for key in self.blocks],
                "left": [[key.hex(), parent.hex(), n] for key, parent, n in self.left],
            }
        )
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Agent:
        fields: dict[str, Any] = json.loads(text)
        version = fields.pop("version", 1)  # version 1 had no such field
        if version > VERSION:
            raise NewerFormat(f"agent version {version} is newer than {VERSION}")
        return cls(
            **fields
            | {
                "namespace": Namespace(bytes.fromhex(fields["namespace"])),
                "blocks": tuple(BlockKey(bytes.fromhex(key)) for key in fields["blocks"]),
                "turns": tuple(fields["turns"]),
                "left": tuple(_agent_block(*block) for block in fields.get("left", ())),
            }
        )


def _agent_block(key: str, parent: str, n_tokens: int) -> AgentBlock:
    return AgentBlock(BlockKey(bytes.fromhex(key)), BlockKey(bytes.fromhex(parent)), n_tokens)
