"""The page of the public API, made from signatures, docstrings and the comments beside fields."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

import keepwarm
from keepwarm import errors

GROUPS = {
    "Models and engines": (
        *("load", "Model", "Engine", "EngineConfig", "MemoryConfig", "Answer", "Warmer"),
        "Settings",
    ),
    "Conversations": ("Session", "Reply", "Compacted", "ToolResult", "Stream", "forget"),
    "Requests": (
        "Request",
        "Sampling",
        "Format",
        "ToolChoice",
        "KVOptions",
        "Policy",
        "Breakpoint",
    ),
    "Events": (
        "Event",
        "Started",
        "Progress",
        "Scored",
        "Embedded",
        "Delta",
        "ToolCallDelta",
        "ToolCalled",
        "Finished",
        "Done",
    ),
    "Results": (
        *("Result", "Choice", "ToolCall", "TokenInfo", "TopLogprob", "Usage", "Receipt", "Miss"),
    ),
    "The store": ("Store", "AttachedModel", "AgentBlocks", "Budgets"),
    "Prompt-cache files": (
        *("export_prompt_cache", "import_prompt_cache", "PromptCacheFile", "Dialect"),
    ),
    "Errors": tuple(name for name in keepwarm.__all__ if hasattr(errors, name)),
}
ERROR = re.compile(r"^    \W*(\w+) +(\d+) *(.*)$", re.MULTILINE)

INTRO = """\
# The public API

Made from the code by `python -m tests.kit.generated`; the suite compares it. Everything here is
imported from `keepwarm` itself. All other modules are internal and change without notice, but for
`keepwarm.kv`, which [caches](caches.md) describes.

"""


# Fields that another page has in a table.
ELSEWHERE = {"Settings": "Its fields: [settings](tuning.md#settings)."}


def api_page() -> str:
    return INTRO + "\n".join(_section(title, names) for title, names in GROUPS.items())


def _section(title: str, names: tuple[str, ...]) -> str:
    entries = _errors(names) if title == "Errors" else "\n".join(_entry(name) for name in names)
    return f"## {title}\n\n{entries}"


def _errors(names: tuple[str, ...]) -> str:
    """A table of the tree in the module's docstring, which has every status and meaning."""
    rows = [_error(*found) for found in ERROR.findall(errors.__doc__ or "") if found[0] in names]
    head = "| error | is a | status | |\n|---|---|---|---|\n"
    return f"{_text(errors.KeepwarmError)}\n\n{head}{''.join(rows)}"


def _error(name: str, status: str, meaning: str) -> str:
    value = getattr(errors, name)
    own = "" if value is errors.KeepwarmError else _first(value)
    shown = ". ".join(part for part in (meaning, own) if part)
    return f"| `{name}` | `{value.__bases__[0].__name__}` | {status} | {shown} |\n"


def _entry(name: str) -> str:
    value = getattr(keepwarm, name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"### `{name}`\n\n{_alias(value)}\n"
    parts = [_signature(name, value), _text(value)]
    if inspect.isclass(value):
        parts += [_values(value), ELSEWHERE.get(name) or _fields(value), _members(value)]
    return f"### `{name}`\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _alias(value: Any) -> str:
    text = re.sub(r"\bkeepwarm\.[\w.]+\.|typing\.", "", str(value))
    return f"`{text}`"


def _signature(name: str, value: Any) -> str:
    """Of functions and of classes that are called; fields and values have a table instead."""
    if inspect.isclass(value) and (is_dataclass(value) or _is_tuple(value) or _is_plain(value)):
        return ""
    return f"```text\n{name}{_parameters(value)}\n```"


def _is_tuple(value: type) -> bool:
    return issubclass(value, tuple)


def _is_plain(value: type) -> bool:
    """Made by the library, or an enumeration or error: nobody calls it with arguments of theirs."""
    return "__init__" not in vars(value)


class _Bare:
    """Shown without the quotes of a string."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _parameters(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    kept = [_shown(p) for p in signature.parameters.values() if p.name not in {"self", "cls"}]
    answer = signature.return_annotation
    return str(signature.replace(parameters=kept, return_annotation=_bare(answer)))


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    if isinstance(default, Enum):
        default = _Bare(_value(default))  # as one writes it
    return parameter.replace(annotation=_bare(parameter.annotation), default=default)


def _value(default: Any) -> str:
    is_named = isinstance(default, Enum)
    return f"{type(default).__name__}.{default.name}" if is_named else repr(default)


def _bare(annotation: Any) -> Any:
    return _Bare(annotation.strip("\"'")) if isinstance(annotation, str) else annotation


def _text(value: Any) -> str:
    text = inspect.cleandoc(value.__doc__ or "")
    return "" if re.match(r"\w+\(", text) else text  # a dataclass without one repeats its fields


def _values(value: type) -> str:
    """Members of an enumeration, and what the code says beside each."""
    if not issubclass(value, Enum):
        return ""
    rows = "".join(f"| `{m.name}` | `{m.value!r}` | {_comment(value, m.name)} |\n" for m in value)
    return f"| value | text | |\n|---|---|---|\n{rows}".rstrip()


def _fields(value: type) -> str:
    rows = "".join(_rows(value))
    return f"| field | type | default | |\n|---|---|---|---|\n{rows}".rstrip() if rows else ""


def _rows(value: type) -> Iterator[str]:
    if is_dataclass(value):
        for field in fields(value):
            yield _row(value, field.name, str(field.type), _default(field))
    elif _is_tuple(value):
        defaults = getattr(value, "_field_defaults", {})
        for name in getattr(value, "_fields", ()):
            shown = repr(defaults[name]) if name in defaults else ""
            yield _row(value, name, str(value.__annotations__[name]), shown)


def _row(value: type, name: str, kind: str, default: str) -> str:
    kind = re.sub(r"ForwardRef\('(.*?)'.*\)", r"\1", kind).replace("|", "\\|")
    shown = f"`{default}`" if default else ""
    return f"| `{name}` | `{kind}` | {shown} | {_comment(value, name)} |\n"


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return _value(field.default)
    return f"{field.default_factory.__name__}()" if field.default_factory is not MISSING else ""


def _comment(value: type, name: str) -> str:
    """What the code says beside a field."""
    said = re.search(rf"^    {name}(?:: | = )[^#\n]+#(.+)$", inspect.getsource(value), re.MULTILINE)
    return said[1].strip().replace("|", "\\|") if said else ""


def _members(value: type) -> str:
    lines = [_member(name, member) for name, member in vars(value).items() if _is_shown(name)]
    return "\n".join(line for line in lines if line)


def _is_shown(name: str) -> bool:
    return not name.startswith("_")


def _member(name: str, member: Any) -> str:
    if isinstance(member, property):
        return f"- `.{name}` {_first(member)}".rstrip()
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if not inspect.isfunction(function):
        return ""
    return f"- `.{name}{_parameters(function)}` {_first(function)}".rstrip()


def _first(member: Any) -> str:
    """The first paragraph, in one line."""
    text = inspect.cleandoc(member.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split())
