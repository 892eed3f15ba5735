"""Mutants of safetensors files: weights, prompt caches, and records with their digests."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from keepwarm.records.header import HeaderText
from keepwarm.records.record import Tensor, tensor_digest
from tests.kit.mutants.changes import DTYPES, NUMBERS, TEXTS, JsonMutant, little, parsed, spoil


def safetensors(chance: Random, data: bytes) -> bytes:
    return _safetensors(chance, data, lambda mutant, _: mutant.text())


def record(chance: Random, data: bytes) -> bytes:
    """A record of a store: its header is in the metadata, as JSON within JSON."""
    return _safetensors(chance, data, _signed)


def _safetensors(
    chance: Random, data: bytes, finish: Callable[[JsonMutant, bytes], bytes]
) -> bytes:
    start = 8 + int.from_bytes(data[:8], "little")
    tree = parsed(data[8:start])
    if not tree or chance.random() < 0.25:
        return spoil(chance, data)
    mutant, body = JsonMutant(chance, tree), data[start:]
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        change = chance.choice([_retype, _move, _resize, None, None])
        tensors = [name for name, entry in mutant.tree.items() if _is_entry(entry)]
        if change is None or not tensors:
            mutant.change()
        else:
            body = change(chance, mutant.tree, tensors, body)
    if chance.random() < 0.1:
        body = spoil(chance, body)
    text = finish(mutant, body)
    n_text = len(text) if chance.random() < 0.95 else chance.choice(NUMBERS)
    return little(n_text, 8) + text + body


def _is_entry(entry: Any) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    is_pair = isinstance(offsets, list) and len(offsets) == 2
    return is_pair and all(type(at) is int and 0 <= at < 1 << 31 for at in offsets)


def _retype(chance: Random, tree: dict[str, Any], tensors: list[str], body: bytes) -> bytes:
    """Another dtype, or another name, with all else as it was."""
    name = chance.choice(tensors)
    if chance.random() < 0.7:
        tree[name]["dtype"] = chance.choice(DTYPES)
    else:
        tree[chance.choice([*TEXTS, *tensors, f"{name}.0"])] = tree.pop(name)
    return body


def _move(chance: Random, tree: dict[str, Any], tensors: list[str], body: bytes) -> bytes:
    """Offsets that overlap, leave gaps, run backwards or end behind the file."""
    entry = tree[chance.choice(tensors)]
    a, b = entry["data_offsets"]
    by = chance.choice([1, -1, 4, 8, b - a, a - b, 1 << 20, 1 << 40, 1 << 63])
    taken = tree[chance.choice(tensors)]["data_offsets"]
    entry["data_offsets"] = chance.choice(
        [[a + by, b + by], [a, b + by], [a + by, b], [b, a], list(taken), [-b, -a]]
    )
    return body


def _resize(chance: Random, tree: dict[str, Any], tensors: list[str], body: bytes) -> bytes:
    """A whole file in which the shape of the last tensor is another."""
    name = max(tensors, key=lambda name: tree[name]["data_offsets"][1])
    entry = tree[name]
    shape = chance.choice([[], [0], [1], [3, 5], [1] * 9, [1, 2, 3, 4], [2, 0, 2, 2], [7] * 3])
    entry["shape"], entry["dtype"] = shape, chance.choice(["U8", "BOOL", "I8"])
    n_bytes = 1
    for n in shape:
        n_bytes *= n
    start = entry["data_offsets"][0]
    entry["data_offsets"] = [start, start + n_bytes]
    return body[:start] + bytes(n_bytes)


def _signed(mutant: JsonMutant, body: bytes) -> bytes:
    """The header with a change inside the inner JSON, and digests that fit."""
    chance, metadata = mutant.chance, mutant.tree.get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("keepwarm"), str):
        return mutant.text()
    inner = JsonMutant(chance, parsed(metadata["keepwarm"].encode("utf-8", "surrogatepass")))
    if chance.random() < 0.5:
        inner.change()
    if isinstance(inner.tree.get("digests"), dict):
        _sign_tensors(inner.tree["digests"], mutant.tree, body)
    said = inner.text().decode("utf-8", "surrogatepass")
    head = HeaderText(
        {"keepwarm": said}, {k: v for k, v in mutant.tree.items() if k != "__metadata__"}
    )
    if chance.random() < 0.9:
        head.metadata["digest"] = _digest(head, said)
    mutant.tree = {"__metadata__": head.metadata} | head.table
    text = mutant.text()
    return text + b" " * (-len(text) % 8)


def _digest(head: HeaderText, said: str) -> str:
    try:
        return head.digest(said)
    except ValueError:  # no file can state half a character
        return "0" * 32


def _sign_tensors(digests: dict[str, Any], table: dict[str, Any], body: bytes) -> None:
    for name, entry in table.items():
        if _is_entry(entry) and isinstance(entry.get("shape"), list):
            a, b = entry["data_offsets"]
            tensor = Tensor(
                name, str(entry.get("dtype")), tuple(entry["shape"]), memoryview(body)[a:b]
            )
            try:
                digests[name] = tensor_digest(tensor)
            except (UnicodeEncodeError, TypeError, ValueError):
                continue  # no file can state such a shape or name
