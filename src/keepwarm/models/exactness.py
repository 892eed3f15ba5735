"""Types of models whose restored prompts were shown to give a cold run's numbers.

`exact.json` has those that the table of architectures calls exact, by dtype. Any other may drift:
rounding depends on where a prompt is cut into slices, also in plain mlx-lm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import MODEL_REMAPPING

FILE = Path(__file__).with_name("exact.json")
IN_16_BITS = {mx.bfloat16, mx.float16}


def may_drift(module: Any, dtypes: set[mx.Dtype]) -> bool:
    """Whether the table does not call this type exact in the dtypes of its caches; it has one
    column for 16 bits, of bfloat16, which rounds more.
    """
    kind = str(getattr(module, "model_type", ""))
    column = "bfloat16" if dtypes & IN_16_BITS else "float32"
    return MODEL_REMAPPING.get(kind, kind) not in json.loads(FILE.read_text())[column]
