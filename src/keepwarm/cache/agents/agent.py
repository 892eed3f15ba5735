"""One named conversation, as its file has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from keepwarm.cache.agents.branch import Branch
from keepwarm.errors import BadInput, BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.store.tier import NamedBlock

VERSION = 4
MAX_LABELS, MAX_KEY, MAX_VALUE = 16, 64, 512
OWN = ("id", "pinned", "quota_bytes", "retention_s", "created", "used", "forked_from", "metadata")


@dataclass(frozen=True)
class Agent:
    """`namespace`, `blocks`, `n_tokens` and `turns` are those of its head."""

    id: str
    head: Branch
    sides: tuple[Branch, ...] = ()  # other branches
    pinned: bool = False
    quota_bytes: int | None = None  # the head's first blocks, up to this size, are not evicted
    retention_s: float | None = None  # deleted when unused for longer
    created: float = 0.0
    used: float = 0.0
    forked_from: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)  # its user's labels and notes
    left: tuple[NamedBlock, ...] = ()  # of no branch any more, while they exist
    ephemeral: bool = False  # of this process; it has no file, and nothing of it is written

    @property
    def namespace(self) -> Namespace:
        return self.head.namespace

    @property
    def blocks(self) -> tuple[BlockKey, ...]:
        return self.head.blocks

    @property
    def n_tokens(self) -> int:
        return self.head.n_tokens

    @property
    def turns(self) -> tuple[int, ...]:
        return self.head.turns

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches, the head first."""
        return (self.head, *self.sides)

    def branch(self, number: int | None) -> Branch:
        """A branch by its number; None: the head."""
        found = [each for each in self.branches if number in (None, each.number)]
        if not found:
            known = ", ".join(str(each.number) for each in self.branches)
            raise BadInput(f"{self.id!r} has no branch {number}; its branches are {known}.")
        return found[0]

    def on(self, number: int | None) -> Self:
        """The agent as if this branch were its head."""
        head = self.branch(number)
        sides = tuple(each for each in self.branches if each.number != head.number)
        return replace(self, head=head, sides=sides)

    def forked(
        self, number: int | None, now: float, retention_s: float | None, *, ephemeral: bool
    ) -> Self:
        """A child with the history of a branch, without an id yet."""
        branch = self.branch(number)
        return type(self)(
            "",
            replace(branch, number=1, pinned=False, used=now),
            retention_s=retention_s,
            created=now,
            used=now,
            forked_from=self.id,
            ephemeral=ephemeral,
        )

    def to_json(self) -> str:
        fields = {
            "version": VERSION,
            **{name: getattr(self, name) for name in OWN},
            "branches": [branch.to_json() for branch in self.branches],
            "left": [[key.hex(), parent.hex(), n] for key, parent, n in self.left],
        }
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Agent:
        fields: dict[str, Any] = json.loads(text)
        if fields["version"] > VERSION:
            raise NewerFormat(f"agent version {fields['version']} is newer than {VERSION}")
        if fields["version"] < VERSION:
            raise BadRecord(f"it has the old format {fields['version']}, which is not read")
        head, *sides = map(Branch.from_json, fields["branches"])
        return cls(
            head=head,
            sides=tuple(sides),
            left=tuple(_agent_block(*block) for block in fields["left"]),
            **{name: fields[name] for name in OWN},
        )


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise if there is too much of it; the limits are those of OpenAI's API."""
    sizes = [(len(key), len(value)) for key, value in metadata.items()]
    if len(sizes) > MAX_LABELS or any(k > MAX_KEY or v > MAX_VALUE for k, v in sizes):
        raise BadInput(
            f"An agent has at most {MAX_LABELS} labels, with names of up to {MAX_KEY} and values "
            f"of up to {MAX_VALUE} characters; shorten them."
        )


def _agent_block(key: str, parent: str, n_tokens: int) -> NamedBlock:
    return NamedBlock(BlockKey(bytes.fromhex(key)), BlockKey(bytes.fromhex(parent)), n_tokens)
