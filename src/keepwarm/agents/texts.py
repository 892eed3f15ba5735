"""What is kept of agents in words, beside their blocks: messages, and responses of the server."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BlockKey, Namespace, pack
from keepwarm.prefix.turn import KeptTurn
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.maintenance import file_path, read_file, write_file
from keepwarm.store.tier import as_store_errors

SEPARATOR = "~"  # is in no agent's id
NAME = re.compile(r"[A-Za-z0-9._@-]*~[0-9a-f]{40,72}\.json")
MESSAGES, RESPONSES = "messages", "responses"
VERSION = 1
MAX_BYTES = 16 << 20  # of one agent; its oldest turns go first
PAGE = 4096  # bytes that a file takes at least
OWNER_DIGITS = 8  # of a file's name, for the part of a text's name before "/"
SWEEPS = 64  # while as much is written as may be there: each looks at all files
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, BadRecord, NewerFormat)
LOG = logging.getLogger(__name__)


class AgentTurn(NamedTuple):
    """An agent's conversation at the end of its latest turn."""

    namespace: Namespace
    tokens: Sequence[int] = ()  # empty if they are lost, or there are none
    turn: KeptTurn | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the agent has not said anything yet."""
        return self.turn is not None and not self.turn.messages


class _Entry(NamedTuple):
    turn: KeptTurn
    end: str  # the key of the last block


class TurnFiles:
    """The kept turns of all agents of one store, from which a conversation is rendered where its
    tokens do not suffice.

    An agent has one small file, `messages/<id>.json` (sealed, and under a hidden name, in a sealed
    store). A turn is found by the tokens that the agent had at its end, so a rewind, a fork or a
    branch needs no bookkeeping here.
    """

    def __init__(self, disk: DiskTier, max_bytes: int = MAX_BYTES) -> None:
        self._disk = disk
        self._max_bytes = max_bytes

    def keep(self, agent_id: str, tokens: Sequence[int], end: BlockKey, turn: KeptTurn) -> None:
        """Keep a turn that ended with these tokens, the last of them in the block `end`."""
        turns, name = self._read(agent_id), _digest(tokens)
        if turns is None:  # they may be there
            return
        turns.pop(name, None)
        turns[name] = _Entry(turn, end.hex())  # the last one is the latest
        self._write(agent_id, turns)

    def find(self, agent_id: str, tokens: Sequence[int]) -> KeptTurn | None:
        """The turn that ended with these tokens, if it was kept."""
        entry = (self._read(agent_id) or {}).get(_digest(tokens))
        return None if entry is None else entry.turn

    def find_by_ends(self, agent_id: str, ends: Iterable[BlockKey]) -> list[KeptTurn | None]:
        """The same by last blocks; also where the tokens are lost, because these were evicted."""
        by_end = {entry.end: entry.turn for entry in (self._read(agent_id) or {}).values()}
        return [by_end.get(end.hex()) for end in ends]

    def copy(self, agent_id: str, new_id: str, ends: Iterable[BlockKey]) -> None:
        """Give a fork those turns of its parent that ended with these blocks."""
        wanted = {end.hex() for end in ends}
        turns = (self._read(agent_id) or {}).items()
        if kept := {name: entry for name, entry in turns if entry.end in wanted}:
            self._write(new_id, kept)

    def remove(self, agent_id: str) -> None:
        self._disk.files.remove(file_path(self._disk, MESSAGES, agent_id))

    def remove_others(self, agent_ids: Iterable[str]) -> None:
        """Delete the messages of all agents but these, also of lost ones."""
        kept = {file_path(self._disk, MESSAGES, agent_id) for agent_id in agent_ids}
        for path in set((self._disk.root / MESSAGES).glob("*.json")) - kept:
            self._disk.files.remove(path)

    def _read(self, agent_id: str) -> dict[str, _Entry] | None:
        """None if there may be turns that this process cannot read; damaged ones are lost."""
        try:
            return _parse(read_file(self._disk, file_path(self._disk, MESSAGES, agent_id)))
        except FileNotFoundError:
            return {}
        except UNREADABLE as error:
            LOG.warning("the messages of an agent could not be read: %s", error)
            return None if isinstance(error, OSError | NewerFormat) else {}

    def _write(self, agent_id: str, turns: dict[str, _Entry]) -> None:
        data = _format(turns)
        while len(data) > self._max_bytes and turns:
            del turns[next(iter(turns))]
            data = _format(turns)
        write_file(self._disk, file_path(self._disk, MESSAGES, agent_id), data)


def _digest(tokens: Sequence[int]) -> str:
    return blake2b(pack(tokens), digest_size=16).hexdigest()


def _format(turns: Mapping[str, _Entry]) -> bytes:
    """Turns repeat the messages before them, so each message is written once."""
    pool: dict[str, int] = {}

    def numbers(values: Sequence[Mapping[str, Any]]) -> list[int]:
        return [pool.setdefault(json.dumps(value), len(pool)) for value in values]

    listed = {
        name: {
            "end": end,
            "messages": numbers(turn.messages),
            "tools": numbers(turn.tools),
            "thinking": turn.thinking,
            "template_options": dict(turn.template_options),
            "verbatim": turn.verbatim,
        }
        for name, (turn, end) in turns.items()
    }
    fields = json.dumps({"version": VERSION, "turns": listed})
    return f'{fields[:-1]}, "pool": [{", ".join(pool)}]}}'.encode()


def _parse(data: bytes) -> dict[str, _Entry]:
    fields: dict[str, Any] = json.loads(data)
    if fields["version"] > VERSION:
        raise NewerFormat("messages of a newer version")
    pool = fields["pool"]
    return {name: _Entry(_turn(turn, pool), turn["end"]) for name, turn in fields["turns"].items()}


def _turn(fields: Mapping[str, Any], pool: Sequence[Mapping[str, Any]]) -> KeptTurn:
    return KeptTurn(
        messages=[pool[number] for number in fields["messages"]],
        tools=[pool[number] for number in fields["tools"]],
        thinking=fields["thinking"],
        template_options=fields["template_options"],
        verbatim=fields["verbatim"],
    )


class AgentTexts:
    """The responses that clients refer to by id. Thread-safe.

    Each is a file, `responses/<agent>~<name>.json`, sealed and under hidden names in a sealed
    store. They are kept for a time and up to a size, of small ones, each of which takes a page, a
    few thousand. The oldest goes first, of the owner that has most: what a text's name has before
    "/".
    """

    def __init__(
        self,
        disk: DiskTier,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._disk = disk
        self._max_bytes = max_bytes
        self._clock = clock
        self._unswept_bytes = max_bytes  # written since too much was last looked for

    def put(self, agent_id: str, name: str, data: bytes, ttl_s: float) -> None:
        """Publish a text, of an agent or of none (""), and delete what is too old or too much."""
        write_file(self._disk, self.path_of(agent_id, name), data)
        self._unswept_bytes += max(PAGE, len(data))
        if self._unswept_bytes > self._max_bytes // SWEEPS:
            self._unswept_bytes = 0
            self._expire(ttl_s)

    def path_of(self, agent_id: str, name: str) -> Path:
        return self._directory / f"{self._stem(agent_id)}{SEPARATOR}{self._hash(name)}.json"

    def get(self, name: str, ttl_s: float) -> bytes | None:
        """A text by its name, whichever agent it belongs to."""
        for path in self._directory.glob(f"*{SEPARATOR}{self._hash(name)}.json"):
            with suppress(OSError, BadRecord):
                if self._clock() - path.stat().st_mtime <= ttl_s:
                    return read_file(self._disk, path)
        return None

    def remove(self, name: str) -> None:
        self._remove(self._directory.glob(f"*{SEPARATOR}{self._hash(name)}.json"))

    def remove_agent(self, agent_id: str) -> None:
        """Delete all texts of an agent."""
        self._remove(self._directory.glob(f"{self._stem(agent_id)}{SEPARATOR}*.json"))

    def remove_all(self) -> None:
        """Delete all texts, also those of no agent."""
        self._remove(path for path in self._directory.glob("*.json") if NAME.fullmatch(path.name))

    def _expire(self, ttl_s: float) -> None:
        """Delete the oldest texts, until the rest is neither too old nor too much."""
        by_owner: defaultdict[str, list[tuple[Path, int]]] = defaultdict(list)
        n_bytes: Counter[str] = Counter()
        for path, about in sorted(self._files(), key=lambda pair: -pair[1].st_mtime):
            if self._clock() - about.st_mtime > ttl_s:
                self._remove([path])
                continue
            owner = path.name.partition(SEPARATOR)[2][:OWNER_DIGITS]
            by_owner[owner].append((path, _n_bytes(about)))
            n_bytes[owner] += _n_bytes(about)
        while n_bytes.total() > self._max_bytes:
            ((owner, _),) = n_bytes.most_common(1)
            path, size = by_owner[owner].pop()
            self._remove([path])
            n_bytes[owner] -= size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for entry in os.scandir(self._directory):
            with suppress(FileNotFoundError):  # another process has deleted it
                if NAME.fullmatch(entry.name):
                    yield Path(entry.path), entry.stat(follow_symlinks=False)

    def _remove(self, paths: Iterable[Path]) -> None:
        with as_store_errors(self._disk, "delete responses"):
            for path in list(paths):
                self._disk.files.remove(path)

    @property
    def _directory(self) -> Path:
        return self._disk.root / RESPONSES

    def _stem(self, agent_id: str) -> str:
        cipher = self._disk.cipher
        return agent_id if cipher is None else cipher.hidden(RESPONSES, agent_id.encode()).hex()

    def _hash(self, name: str) -> str:
        """A name may be anything that a client sends."""
        return self._digest(name.partition("/")[0])[:OWNER_DIGITS] + self._digest(name)

    def _digest(self, name: str) -> str:
        plain = name.encode("utf-8", "surrogatepass")
        cipher = self._disk.cipher
        if cipher is not None:
            return cipher.hidden(f"{RESPONSES}.name", plain).hex()
        return blake2b(plain, digest_size=20).hexdigest()


def _n_bytes(about: os.stat_result) -> int:
    return max(PAGE, about.st_size)
