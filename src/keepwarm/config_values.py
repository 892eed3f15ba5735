"""What a setting may be, and how text from a file or the environment becomes a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keepwarm.errors import BadInput
from keepwarm.units import parse_bytes

SECRETS = frozenset({"encryption_key", "api_keys", "admin_key", "remote_password", "fleet_key"})
FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
BYTES = (0, 1 << 62)  # SQLite and the system count bytes in 63 bits
SECONDS = (0.0, 1e9)  # threads cannot wait much longer
COUNT = (1, 1 << 31)
RANGES: Mapping[str, tuple[float, float]] = {
    "max_tokens": COUNT,
    "context": (0, COUNT[1]),
    "max_kv_size": (0, COUNT[1] - 1),
    "quantized_kv_start": (0, COUNT[1]),
    "temperature": (0.0, 1e30),
    "memory_bytes": BYTES,
    "disk_bytes": BYTES,
    "disk_writes_per_day": BYTES,
    "remote_writes_per_day": BYTES,
    "remote_bytes": BYTES,
    "remote_age_s": (0.0, 1e12),
    "retention_s": (0.0, 1e12),
    "port": (0, 65535),
    "max_body_bytes": (1, BYTES[1]),
    "max_concurrency": COUNT,
    "max_queue": COUNT,
    "audit_share": (0.0, 1.0),
    "request_timeout_s": SECONDS,
    "client_timeout_s": (0.1, SECONDS[1]),
    "response_ttl_s": SECONDS,
    "prepare_timeout_s": (0.1, SECONDS[1]),
    "rate_per_minute": (0, COUNT[1]),
    "drain_s": SECONDS,
    "weights_bytes": BYTES,
    "model_ttl_s": SECONDS,
    "load_wait_s": SECONDS,
}

SIZES = frozenset(
    {"memory_bytes", "disk_bytes", "disk_writes_per_day", "max_body_bytes", "weights_bytes"}
    | {"remote_writes_per_day", "remote_bytes"}
)


CHOICES: Mapping[str, tuple[str, ...] | tuple[int, ...]] = {
    "memory": ("automatic", "unconstrained"),
    "sampling": ("model", "greedy"),
    "stable_first": ("off", "own", "all"),
    "share_numerics": ("own", "any"),
    "mcp": ("off", "on", "all"),
    "kv_bits": (0, 2, 4, 8),
    "kv_group_size": (32, 64, 128),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}


def parse_setting(name: str, kind: type, value: Any, source: str) -> Any:
    try:
        return _parse(name, kind, value)
    except ValueError as error:
        shown = "not valid" if name in SECRETS else _shown(value)
        must = f"it must be {_must(name, kind)}"
        raise BadInput(f"The setting {name} is {shown} in {source}; {must}.") from error


def _parse(name: str, kind: type, value: Any) -> Any:
    """ValueError if the value is not of this kind, or out of the setting's range."""
    if name in SIZES and isinstance(value, str):
        value = parse_bytes(value)
    parsed = PARSERS[kind](value)
    if parsed not in CHOICES.get(name, (parsed,)):
        raise ValueError(name)
    if name in RANGES and parsed is not None:
        low, high = RANGES[name]
        if not low <= parsed <= high:
            raise ValueError(name)
    return parsed


def _must(name: str, kind: type) -> str:
    if name in CHOICES:
        return f"one of {', '.join(map(str, CHOICES[name]))}"
    if name not in RANGES:
        return KINDS[kind]
    low, high = RANGES[name]
    size = ", or a size such as 20G" if name in SIZES else ""
    return f"{KINDS[kind]} from {low:,} to {high:,}{size}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "too long"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _parse_flag(value: Any) -> bool:
    if isinstance(value, str):
        value = FLAGS.get(value.lower())
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _parse_whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(value)
    return int(value)


def _parse_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(value) from error
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _parse_text(value: Any) -> str:
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise ValueError(value)
    return str(value)


def _parse_path(value: Any) -> Path:
    text = _parse_text(value)
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError as error:  # the home of a user who does not exist
        raise ValueError(value) from error
    if not text:
        raise ValueError(value)
    return path


OPTIONAL: Any = float | None
MAX_SHOWN = 80  # characters of a bad value in the error
PARSERS: Mapping[type, Callable[[Any], Any]] = {
    bool: _parse_flag,
    int: _parse_whole,
    float: _parse_number,
    OPTIONAL: lambda value: None if value is None else _parse_number(value),
    str: _parse_text,
    Path: _parse_path,
}
KINDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    OPTIONAL: "a number",
    str: "a text",
    Path: "a path",
}
