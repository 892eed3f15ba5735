"""The header of a record as text: JSON without spaces, plain or sealed."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple, Protocol, overload

import xxhash
from pydantic_core import from_json, to_json

from keepwarm.errors import BadRecord
from keepwarm.records.cipher import Cipher

MAX_KNOWN_TABLE = 1 << 15  # characters; 300 tensors
MAX_COUNT = (1 << 47) - 1  # no file is longer, and no array has more items
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


class HasBytes(Protocol):
    """A tensor of a record. On CUDA its bytes may still be on their way: `data` waits for them."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> memoryview: ...
    @property
    def n_bytes(self) -> int: ...


class LazyTensors(Sequence[HasBytes], ABC):
    """Tensors that are made when first asked for; their bytes are counted before."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes

    @abstractmethod
    def make(self) -> tuple[HasBytes, ...]: ...

    @cached_property
    def _made(self) -> tuple[HasBytes, ...]:
        return self.make()

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[HasBytes]:
        return iter(self._made)

    @overload
    def __getitem__(self, index: int) -> HasBytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[HasBytes]: ...
    def __getitem__(self, index: int | slice) -> HasBytes | Sequence[HasBytes]:
        return self._made[index]


class TensorSpan(NamedTuple):
    """The position of a tensor in the data, and what its digest has in front of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    label: bytes


class HeaderText:
    """Metadata, and an entry for every tensor."""

    def __init__(self, metadata: dict[str, Any], table: dict[str, Any]) -> None:
        self.metadata = metadata
        self.table = table

    @classmethod
    def parse(cls, text: bytes | bytearray) -> HeaderText:
        payload: dict[str, Any] = from_json(text, allow_inf_nan=False)
        return cls(payload.pop("__metadata__"), payload)

    @cached_property
    def entries(self) -> str:
        """The table as text: most of the header, and used twice."""
        return to_json(self.table).decode()  # a third of the time of `json`

    def text(self) -> str:
        rest = f",{self.entries[1:]}" if self.table else "}"
        return f'{{"__metadata__":{to_json(self.metadata).decode()}{rest}'

    def padded(self) -> bytes:
        """As in the file."""
        text = self.text().encode()
        return text + b" " * (-len(text) % 8)

    def digest(self, payload: str) -> str:
        return xxhash.xxh3_128(f"{payload}\n{self.entries}".encode()).hexdigest()

    def sealed(self, cipher: Cipher) -> HeaderText:
        """Tensors by number, as bytes; everything else is in one sealed string."""
        spans = (entry["data_offsets"] for entry in self.table.values())
        table = {str(n): entry_json("U8", (b - a,), a, b) for n, (a, b) in enumerate(spans)}
        sealed = cipher.seal(dumps(table).encode(), self.text().encode())
        return HeaderText({"sealed": b64encode(sealed).decode()}, table)

    def opened(self, cipher: Cipher | None) -> HeaderText:
        """The header before it was sealed."""
        if cipher is None:
            if "sealed" in self.metadata:
                raise PermissionError("it is encrypted, and no key is given")
            return self
        if self.metadata.keys() != {"sealed"}:
            raise BadRecord("it is not encrypted, but this store is")
        sealed = b64decode(self.metadata["sealed"], validate=True)
        if b64encode(sealed).decode() != self.metadata["sealed"]:
            raise BadRecord("the header is not canonical")
        return HeaderText.parse(cipher.open(self.entries.encode(), sealed))


def parse_table(table: str, overhead: int) -> tuple[TensorSpan, ...]:
    """The tensors of a record; `overhead` is what encrypting adds to each."""
    parse = _known_table if len(table) <= MAX_KNOWN_TABLE else _parsed
    return parse(table, overhead)


def _parsed(table: str, overhead: int) -> tuple[TensorSpan, ...]:
    return tuple(_places(from_json(table), overhead))


# There is no more in it than the layers and the block's number, so all blocks of a model that have
# the same number have the same table.
_known_table = lru_cache(maxsize=256)(_parsed)


def _places(table: Mapping[str, Any], overhead: int) -> Iterator[TensorSpan]:
    at = 0
    for name, entry in table.items():
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        end = at + math.prod(map(whole, shape)) * ITEM_BYTES[dtype] + overhead
        if [*map(whole, entry["data_offsets"])] != [at, end]:
            raise BadRecord(f"the offsets of {name} do not match its shape")
        yield TensorSpan(name, dtype, shape, at, end, label(name, dtype, shape))
        at = end


def whole(value: Any, least: int = 0) -> int:
    """A count from JSON, which may also hold floats, negative or huge numbers."""
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise BadRecord("a count in the header is out of range")
    return value


def entry_json(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def label(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The same as `dumps` of the three in a list, ten times faster: every tensor has one."""
    return f"[{quoted(name)},{_kind(dtype, shape)}]".encode()


@lru_cache(maxsize=256)
def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{quoted(dtype)},[{','.join(map(str, shape))}]"


def dumps(value: Any) -> str:
    return ENCODER.encode(value)
