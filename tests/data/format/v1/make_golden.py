"""Make the golden records of format version 1 with the code that runs this script.

    python tests/data/format/v1/make_golden.py      (writes beside itself)

Only for a version that has not been released: files of a released version are never made again.
Bytes count up from 0, modulo 251; `expected.json` says what a reader must find.
"""

import json
from hashlib import sha256
from math import prod
from pathlib import Path

from keepwarm.prefix.blocks import Namespace, chain, unpack
from keepwarm.records.header import ITEM_BYTES
from keepwarm.records.record import Header, Part, Record, Tensor, encode_record

NAMESPACE = Namespace(bytes(range(32)))
PROMPT = [7 * n % 50_000 for n in range(300)]
RECORDS = {
    "delta": (0, Part.DELTA, {}, [
        ("L0_B0_K", "F16", (1, 2, 256, 2)), ("L0_B0_V", "F16", (1, 2, 256, 2)),
    ]),
    "tail": (1, Part.DELTA, {}, [
        ("L0_B1_K", "BF16", (1, 1, 44, 4)), ("L0_B1_V", "BF16", (1, 1, 44, 4)),
    ]),
    "quantised": (1, Part.DELTA, {}, [
        ("L3_B1_K_weights", "U32", (1, 1, 44, 2)), ("L3_B1_K_scales", "F32", (1, 1, 44, 1)),
        ("L3_B1_K_biases", "F32", (1, 1, 44, 1)),
    ]),
    "window": (1, Part.WINDOW, {"first_rows": {"2": 12}, "w_rows": 32}, [
        ("L2_B1_K", "F32", (1, 1, 32, 2)), ("L2_B1_V", "F32", (1, 1, 32, 2)),
    ]),
    "state": (1, Part.STATE, {}, [
        ("L1.0_B1_S0", "F32", (1, 3, 8)), ("L1.0_B1_S1", "F32", (1, 0, 4)),
    ]),
}  # fmt: skip


def tensor(name, dtype, shape):
    n_bytes = prod(shape) * ITEM_BYTES[dtype]
    return Tensor(name, dtype, shape, memoryview(bytes(n % 251 for n in range(n_bytes))))


def record(number, part, extra, tensors):
    ref = list(chain(NAMESPACE, PROMPT))[number]
    header = Header(NAMESPACE, ref.key, ref.parent, part, number, ref.tokens, extra, version=1)
    return Record(header, tuple(tensor(*spec) for spec in tensors))


def expected(made):
    """In plain words, so that a reader of another version can be held against them."""
    header = made.header
    return {
        "version": header.version,
        "namespace": header.namespace.hex(),
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "part": header.part.value,
        "number": header.number,
        "tokens": unpack(header.tokens),
        "extra": dict(header.extra),
        "tensors": [
            [t.name, t.dtype, list(t.shape), sha256(t.data).hexdigest()] for t in made.tensors
        ],
    }


def main():
    here = Path(__file__).parent
    made = {name: record(*spec) for name, spec in RECORDS.items()}
    for name, one in made.items():
        (here / f"{name}.safetensors").write_bytes(b"".join(encode_record(one)))
    lines = [f"{json.dumps(name)}: {json.dumps(expected(one))}" for name, one in made.items()]
    (here / "expected.json").write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
