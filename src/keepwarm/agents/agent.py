"""One named conversation and its branches, as its file has them, and where a turn belongs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

from keepwarm.agents.block_refs import find_block_refs
from keepwarm.errors import BadInput, BadRecord, NewerFormat
from keepwarm.prefix.blocks import (
    BLOCK_TOKENS,
    BlockKey,
    BlockRef,
    Namespace,
    block_key,
    chain,
    common_prefix,
    common_tokens,
    root,
)
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.tier import NamedBlock

VERSION = 4
MAX_LABELS, MAX_KEY, MAX_VALUE = 16, 64, 512
OWN = ("id", "pinned", "quota_bytes", "retention_s", "created", "used", "forked_from", "metadata")
TITLE = "title"  # the label that is shown instead of the first words
MIN_SHARED_TOKENS = 64  # fewer may be just a template's and a client's first words
TOOL_WAIT_S = 3600.0  # how long other branches are taken for the work of a tool


@dataclass(frozen=True)
class Branch:
    """One line of a conversation."""

    namespace: Namespace
    blocks: tuple[BlockKey, ...] = ()  # from the first token on; the last may be open
    n_tokens: int = 0
    turns: tuple[int, ...] = ()  # where each turn ended, in tokens
    ends: tuple[BlockKey, ...] = ()  # of each turn, the key of its last block then
    number: int = 1  # by which it is named; never used again
    model: str = ""  # name of the model
    n_opening: int = 0  # tokens of its first prompt
    n_prompt: int = 0  # tokens of its latest prompt
    main: bool = False
    waits: bool = False  # its latest answer called a tool
    pinned: bool = False  # beside the pin of the agent, which is the head's
    used: float = 0.0

    @classmethod
    def of(
        cls, namespace: Namespace, tokens: Sequence[int], turns: Sequence[int] = (), **fields: Any
    ) -> Self:
        """The branch that these tokens are."""
        refs = list(chain(namespace, tokens))
        kept = tuple(n for n in turns if n <= len(tokens))
        return cls(
            namespace,
            blocks=tuple(ref.key for ref in refs),
            n_tokens=len(tokens),
            turns=kept,
            ends=tuple(end_key(namespace, refs, n) for n in kept),
            **fields,
        )

    @property
    def sized_blocks(self) -> list[NamedBlock]:
        """Its blocks, with sizes."""
        parents = (root(self.namespace), *self.blocks)
        sizes = (self.n_tokens - n * BLOCK_TOKENS for n in range(len(self.blocks)))
        return [
            NamedBlock(key, parent, min(n_tokens, BLOCK_TOKENS))
            for key, parent, n_tokens in zip(self.blocks, parents, sizes, strict=False)
        ]

    def turn_ends(self) -> list[NamedBlock]:
        """The open blocks that ended with its turns; longer ones may have replaced them."""
        parents = (root(self.namespace), *self.blocks)
        return [
            NamedBlock(key, parents[n // BLOCK_TOKENS], n % BLOCK_TOKENS)
            for n, key in zip(self.turns, self.ends, strict=True)
            if n % BLOCK_TOKENS
        ]

    def first(self, turn: int) -> Self:
        """The branch up to the end of a turn; 0: before the first."""
        n_tokens = self.turns[turn - 1] if turn else 0
        blocks = self.blocks[: -(-n_tokens // BLOCK_TOKENS)]
        if turn:
            blocks = (*blocks[:-1], self.ends[turn - 1])
        return replace(
            self,
            blocks=blocks,
            n_tokens=n_tokens,
            turns=self.turns[:turn],
            ends=self.ends[:turn],
            n_prompt=min(self.n_prompt, n_tokens),
            main=self.main and turn > 0,
            waits=False,
        )

    def to_json(self) -> dict[str, Any]:
        keys = {name: [key.hex() for key in getattr(self, name)] for name in ("blocks", "ends")}
        return asdict(self) | keys | {"namespace": self.namespace.hex()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        keys = {name: _keys(fields[name]) for name in ("blocks", "ends")}
        namespace = Namespace(bytes.fromhex(fields["namespace"]))
        return cls(**{**fields, **keys, "namespace": namespace, "turns": tuple(fields["turns"])})


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
    opening: str = ""  # its client, and the first words of its user
    left: tuple[NamedBlock, ...] = ()  # of no branch any more, while they exist
    namespaces: tuple[Namespace, ...] = ()  # that its branches had before the latest turn
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
    def title(self) -> str:
        """For people: its label, or what it began with."""
        return self.metadata.get(TITLE) or self.opening

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

    @property
    def is_protected(self) -> bool:
        """Whether some of it is kept from being evicted."""
        return self.pinned or bool(self.quota_bytes) or any(each.pinned for each in self.branches)

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
            metadata=self.metadata,
            opening=self.opening if branch.n_tokens else "",
            ephemeral=ephemeral,
        )

    def to_json(self) -> str:
        fields = {
            "version": VERSION,
            **{name: getattr(self, name) for name in OWN},
            "branches": [branch.to_json() for branch in self.branches],
            "opening": self.opening,
            "left": [[key.hex(), parent.hex(), n] for key, parent, n in self.left],
            "namespaces": [name.hex() for name in self.namespaces],
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
            opening=fields.get("opening", ""),
            left=tuple(_agent_block(*block) for block in fields["left"]),
            namespaces=tuple(Namespace(bytes.fromhex(n)) for n in fields.get("namespaces", ())),
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


class EndedTurn(NamedTuple):
    """A request and its answer, as tokens."""

    namespace: Namespace
    tokens: Sequence[int]
    n_prompt: int
    model: str = ""
    called: bool = False  # the answer called a tool
    continues: bool = False  # it was asked of the agent, with only its new messages


class MatchedBranch(NamedTuple):
    """The branch of a turn, as it was before, and whether it is the head now."""

    branch: Branch
    before: Branch | None  # None: it is new
    n_shared: int  # tokens of `before` that it still has
    is_head: bool


class BranchMatcher:
    """Finds the branch of one turn among those of an agent, and which of them is its head.

    A request continues the branch whose tokens it extends, or opens another. Tokens are compared
    one by one: by block keys, which are hashes of tokens, and inside a block by the tokens on disk.
    """

    def __init__(self, disk: DiskTier, turn: EndedTurn, now: float) -> None:
        self._disk = disk
        self._turn = turn
        self._now = now
        self._refs = list(chain(turn.namespace, turn.tokens))
        self._keys = tuple(ref.key for ref in self._refs)

    def match(self, head: Branch, sides: Sequence[Branch]) -> MatchedBranch:
        branches = [head, *sides]
        shared = {branch.number: self._n_shared(branch) for branch in branches}

        def closeness(branch: Branch) -> tuple[int, bool, float]:
            n_shared = shared[branch.number]
            return n_shared, n_shared == branch.n_tokens, branch.used

        nearest = max(branches, key=closeness)
        n_shared = shared[nearest.number]
        if n_shared == nearest.n_tokens or 0 < nearest.n_prompt <= n_shared:
            branch, before = self._continued(nearest, n_shared), nearest
        else:
            number = 1 + max(each.number for each in branches)
            branch, before = self._opened(nearest, n_shared, number), None
        if self._is_main(before, head, shared[head.number]):
            branch = replace(branch, main=True)
        return MatchedBranch(branch, before, n_shared, self._is_head(branch, head))

    def _is_main(self, before: Branch | None, head: Branch, n_shared: int) -> bool:
        """Whether it begins as the head does, or its conversation has gone on."""
        if self._turn.continues:
            return True
        if before is not None and (before.main or before.number == head.number):
            return before.main or self._grew(before)
        if self._begins_as(head, n_shared):
            return True
        return before is not None and self._grew(before) and not self._is_busy(head)

    def _is_head(self, branch: Branch, head: Branch) -> bool:
        if branch.main or branch.number == head.number:
            return True
        is_longer = branch.n_tokens > head.n_tokens
        return is_longer and not head.main and not self._is_busy(head)

    def _is_busy(self, head: Branch) -> bool:
        """Whether it waits for a tool; other branches may be that tool's."""
        return head.waits and self._now - head.used < TOOL_WAIT_S

    def _grew(self, before: Branch) -> bool:
        """Not if the same request was sent again."""
        return bool(before.n_tokens) and self._turn.n_prompt > before.n_prompt

    def _begins_as(self, head: Branch, n_shared: int) -> bool:
        if head.namespace != self._turn.namespace:  # their tokens cannot be compared
            return 0 < head.n_opening <= self._turn.n_prompt
        return n_shared >= max(MIN_SHARED_TOKENS, head.n_opening / 2)

    def _continued(self, branch: Branch, n_shared: int) -> Branch:
        n_opening = branch.n_opening if branch.n_tokens else self._turn.n_prompt
        return self._with_turn(replace(branch, n_opening=n_opening), n_shared)

    def _opened(self, nearest: Branch, n_shared: int, number: int) -> Branch:
        """Where it parts from the nearest branch, it has the same turns until there."""
        fresh = Branch(self._turn.namespace, turns=nearest.turns, ends=nearest.ends, number=number)
        made = self._with_turn(fresh, n_shared)
        is_edit = len(made.turns) > 1
        return replace(made, n_opening=nearest.n_opening if is_edit else self._turn.n_prompt)

    def _with_turn(self, branch: Branch, n_shared: int) -> Branch:
        """The branch at the end of the turn, with those turns whose tokens it still has."""
        turn, n_tokens = self._turn, len(self._turn.tokens)
        turns = (*(n for n in branch.turns if n <= n_shared and n < n_tokens), n_tokens)
        return replace(
            branch,
            namespace=turn.namespace,
            blocks=self._keys,
            n_tokens=n_tokens,
            turns=turns,
            ends=tuple(end_key(turn.namespace, self._refs, n) for n in turns),
            model=turn.model or branch.model,
            n_prompt=turn.n_prompt,
            waits=turn.called,
            used=self._now,
        )

    def _n_shared(self, branch: Branch) -> int:
        """How many first tokens the turn has in common with a branch."""
        if branch.namespace != self._turn.namespace:
            return 0
        n_same = common_prefix(branch.blocks, self._keys)
        n_known = n_same * BLOCK_TOKENS
        if n_same == len(branch.blocks):
            return branch.n_tokens
        if n_same == len(self._refs):
            return n_known
        block, rest = branch.sized_blocks[n_same], self._rest(n_same)
        if block_key(branch.namespace, block.parent, rest[: 4 * block.n_tokens]) == block.key:
            return n_known + block.n_tokens
        held = next(find_block_refs(self._disk, [block], block.n_tokens), None)
        if held is not None:
            return n_known + common_tokens(held.tokens, rest)
        return max(n_known, self._n_shared_turns(branch))

    def _n_shared_turns(self, branch: Branch) -> int:
        """The last of its turns that the tokens have in common; for blocks that are gone."""
        pairs = zip(branch.turns, branch.ends, strict=True)
        return max((n for n, key in pairs if self._ends_with(n, key)), default=0)

    def _ends_with(self, n_tokens: int, key: BlockKey) -> bool:
        in_turn = n_tokens <= len(self._turn.tokens)
        return in_turn and end_key(self._turn.namespace, self._refs, n_tokens) == key

    def _rest(self, n_same: int) -> bytes:
        """The tokens of the first block that differs."""
        return self._refs[n_same].tokens


def end_key(namespace: Namespace, refs: Sequence[BlockRef], n_tokens: int) -> BlockKey:
    """The key of the last block when a chain had this many tokens."""
    if not n_tokens:
        return root(namespace)
    ref = refs[(n_tokens - 1) // BLOCK_TOKENS]
    tokens = ref.tokens[: 4 * (n_tokens - ref.number * BLOCK_TOKENS)]
    return block_key(namespace, ref.parent, tokens)


def _keys(texts: Sequence[str]) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(bytes.fromhex(text)) for text in texts)
