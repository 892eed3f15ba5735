"""Mutants of files: flipped bytes, and lies at the places where a format states lengths and types.

Each is made from a sample and a seed alone, so that a number is enough to see one again. Digests
and checksums are mostly made right again, so that a lie gets past them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

from keepwarm.records.header import dumps

NUMBERS = [
    *(sign * ((1 << bits) + more) for bits in (0, 8, 15, 16, 31, 32, 47, 53, 62, 63, 64)
      for more in (-1, 0, 1) for sign in (1, -1)),
    10**30, 10**400,
]  # fmt: skip
DTYPES = ["F32", "F16", "BF16", "U8", "BOOL", "I64", "U32", "F64", "F8_E4M3", "C64", "f32", "", "X"]
TEXTS = [
    "",
    "a" * 70_000,
    "\0",
    "\ud800",
    "0",
    "-1",
    "9" * 40,
    "../../x",
    "é" * 300,
    "1.0.0",
    "NaN",
]
WORDS = [
    "NaN", "-Infinity", "1e999", "-0.0", "1.5", "true", "null", "[]", "{}", "9" * 5000,
    "[" * 50_000 + "]" * 50_000, '{"a":' * 20_000 + "1" + "}" * 20_000,
    "[" + "0," * 100_000 + "0]", '{"a":1,"a":2}', "", "\\", '"\\ud800"', "\xff",
]  # fmt: skip
MARK = "\x01word %d\x01"  # stands for a word in JSON until it is text

Mutate = Callable[[Random, bytes], bytes]


def spoil(chance: Random, data: bytes) -> bytes:
    """Bytes flipped, cut, put in, taken out, doubled or overwritten, mostly near the beginning."""
    near = min(len(data), 4096) if chance.random() < 0.5 else len(data)
    at = chance.randrange(near + 1)
    n = min(chance.choice([1, 2, 4, 8, 100, 512, 5000]), len(data) - at)
    new = chance.choice([
        bytes(byte ^ 1 << chance.randrange(8) for byte in data[at : at + min(n, 8)]),
        chance.randbytes(n), bytes(n), b"\xff" * n, little(chance.choice(NUMBERS), 8),
    ])  # fmt: skip
    return chance.choice([
        data[:at], data[:at] + data[at + n :], data[:at] + new + data[at:],
        data[:at] + new + data[at + len(new) :], data[: at + n] + data[at:],
    ])  # fmt: skip


def little(number: int, n_bytes: int) -> bytes:
    return (number % (1 << 8 * n_bytes)).to_bytes(n_bytes, "little")


class JsonMutant:
    """A tree with changes, some of which only text can express."""

    def __init__(self, chance: Random, tree: Any) -> None:
        self.chance = chance
        self.tree = tree
        self.words: list[str] = []

    def text(self) -> bytes:
        text = dumps(self.tree)
        for number, word in enumerate(self.words):
            text = text.replace(json.dumps(MARK % number), word)
        return text.encode("utf-8", "surrogatepass")

    def change(self) -> None:
        places = list(_places(self.tree))
        if not places:
            return
        node, name = self.chance.choice(places)
        other, there = self.chance.choice(places)
        match self.chance.randrange(6):
            case 0:
                del node[name]
            case 1:
                node[name] = deepcopy(other[there])
            case 2:
                node[name], other[there] = deepcopy(other[there]), deepcopy(node[name])
            case 3 if isinstance(node, dict):
                node[self.chance.choice([*TEXTS, str(there)])] = node.pop(name)
            case 4 if isinstance(node, list):
                node.append(node[name])
            case _:
                node[name] = self.value(node[name])

    def value(self, old: Any) -> Any:
        """Another value, often of the same type."""
        same = {int: NUMBERS, str: [*TEXTS, *DTYPES]}.get(type(old))
        if same is not None and self.chance.random() < 0.6:
            return self.chance.choice(same)
        if self.chance.random() < 0.5:
            self.words.append(self.chance.choice(WORDS))
            return MARK % (len(self.words) - 1)
        return self.chance.choice([*NUMBERS, *TEXTS, None, True, 1.5, [], {}, [old], {"0": old}])


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for name in node if isinstance(node, dict) else range(len(node)):
        yield node, name
        if isinstance(node[name], dict | list):
            yield from _places(node[name])


def parsed(text: bytes) -> dict[str, Any]:
    """An object of JSON; empty if it is none, as after an earlier change."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}
