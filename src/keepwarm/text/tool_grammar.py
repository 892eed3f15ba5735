"""Grammars that Keepwarm writes: a forced call, an answer without calls, reasoning before it.

They are Lark as llguidance reads it: delimiters as tokens, the arguments of a call by the tool's
JSON schema. A call has the format that the model itself writes. Spaces are those that templates
write, so that the next prompt, with the call rendered into it, begins with the tokens that were
generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from keepwarm.errors import BadInput
from keepwarm.text.parsing import Markup, Preamble
from keepwarm.text.request import Tool, ToolChoice
from keepwarm.text.tools import HARMONY, ToolFormat, parses

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GUIDANCE = {**_SPACES, "lenient": True}  # unknown schema keywords are ignored, not refused
# Keywords by which an object's keys are not only those of its `properties`.
_OPEN_KEYS = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"),
    *("allOf", "anyOf", "oneOf", "if"),
}
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}


class CallSyntax(NamedTuple):
    """The text around the name and the JSON arguments of a call."""

    before: str
    between: str
    after: str
    separator: str | None = "\n"  # between two calls; None: one call only
    open: str = ""  # before the first call
    close: str = ""


_SYNTAXES = {
    "[TOOL_CALLS]": CallSyntax("[TOOL_CALLS]", "[ARGS]", "", separator=""),
    "<|tool_calls_section_begin|>": CallSyntax(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
        separator=None,  # the number after the name counts the calls
    ),
    HARMONY.start: CallSyntax(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", separator=None
    ),
}
_LIST = CallSyntax('{"name": "', '", "arguments": ', "}", ", ", open="[TOOL_CALLS][", close="]")


def call_grammar(tools: Sequence[Tool], choice: ToolChoice, markup: Markup) -> str | None:
    """A grammar for an answer that must be a call; None where the model may choose.

    A model that reasons may do so first. If the prompt has already opened the reasoning, the
    grammar applies after its end.
    """
    if choice.mode != "required" and choice.name is None:
        return None
    if not tools:
        raise BadInput("tool_choice asks for a call, but there are no tools; send some.")
    wanted = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not wanted:
        raise BadInput(f"tool_choice names {choice.name!r}, which is not in tools; add it.")
    writer = LarkWriter(markup.tokenizer)
    several = choice.parallel and choice.name is None
    blanks = "/[ \\n]{0,4}/" if markup.preamble.think_start else ""
    rules = [
        *_calls(writer, markup.tool_format, wanted, several),
        *writer.thoughts(markup.preamble),
    ]
    return "\n".join([f"start: thoughts {blanks} calls", *rules]) + "\n"


def no_call_grammar(markup: Markup) -> str | None:
    """A grammar for an answer without calls; None if calls do not start with plain text."""
    writer = LarkWriter(markup.tokenizer)
    call_start = markup.tool_format.start
    if writer.has_token(call_start):
        return None
    stops = markup.tokenizer.eos_token_ids
    added = [str(token) for token in sorted(writer.added.values()) if token not in stops]
    rules = [f"added: <[{','.join(added)}]>"] if added else []
    start = "start: TEXT? (added TEXT?)*" if added else "start: TEXT?"
    return "\n".join([start, *rules, f"TEXT: {writer.without(call_start)}"]) + "\n"


def _calls(
    writer: LarkWriter, tool_format: ToolFormat, tools: Sequence[Tool], several: bool
) -> Iterator[str]:
    """The rule `calls`, one call or several if allowed, and the rules it needs."""
    syntax = _syntax(writer, tool_format)
    if syntax is None and not _parses_xml(tool_format):
        raise BadInput(
            f"tool_choice cannot force a call in the format of this model ({tool_format.start} …); "
            "use tool_choice auto."
        )
    around = syntax or CallSyntax("", "", "")
    more = f"({writer.literal(around.separator or '')} call)*"
    more = more if several and around.separator is not None else ""
    yield f"calls: {writer.literal(around.open)} call {more} {writer.literal(around.close)}"
    yield "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))
    for index, tool in enumerate(tools):
        if syntax is not None:
            yield _json_call(writer, syntax, index, tool["function"])
        else:
            yield from _xml_call(writer, tool_format, index, tool["function"])


def _syntax(writer: LarkWriter, tool_format: ToolFormat) -> CallSyntax | None:
    """The JSON syntax that this format's parser accepts, if there is one."""
    plain = CallSyntax(
        f'{tool_format.start}\n{{"name": "', '", "arguments": ', f"}}\n{tool_format.end}"
    )
    syntax = _SYNTAXES.get(tool_format.start, plain)
    if tool_format.start == "[TOOL_CALLS]" and "[ARGS]" not in writer.added:
        syntax = _LIST
    call = f'{syntax.before}f{syntax.between}{{"a": 1}}{syntax.after}'
    text = f"{syntax.open}{call}{syntax.close}"
    return syntax if _parses(tool_format, text) else None


def _parses_xml(tool_format: ToolFormat) -> bool:
    call = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    return _parses(tool_format, f"{tool_format.start}\n{call}\n{tool_format.end}")


def _parses(tool_format: ToolFormat, text: str) -> bool:
    """Whether the format's parser reads this text, delimiters included, as f(a=1)."""
    body = text.partition(tool_format.start)[2].removesuffix(tool_format.end)
    return parses(tool_format.parse, body)


def _json_call(
    writer: LarkWriter, syntax: CallSyntax, index: int, function: Mapping[str, Any]
) -> str:
    before = writer.literal(syntax.before + function["name"] + syntax.between)
    schema = function.get("parameters") or _NO_PARAMETERS
    if schema.get("properties") == {} and not _OPEN_KEYS & schema.keys():
        schema = _NO_PARAMETERS  # as a function without any is commonly written
    arguments = _json_rule(_closed({**schema, "type": "object"}))
    return f"call_{index}: {before} {arguments} {writer.literal(syntax.after)}"


def _xml_call(
    writer: LarkWriter, tool_format: ToolFormat, index: int, function: Mapping[str, Any]
) -> Iterator[str]:
    """Parameters in the order of the schema; strings bare, all else as JSON."""
    schema: Mapping[str, Any] = function.get("parameters") or _NO_PARAMETERS
    required = schema.get("required", ())
    parts = []
    for number, (name, wanted) in enumerate(schema.get("properties", {}).items()):
        rule = f"call_{index}_{number}"
        parts.append(rule if name in required else f"{rule}?")
        yield f"{rule}: {writer.literal(f'<parameter={name}>' + chr(10))} {rule}_value"
        yield _xml_value(writer, f"{rule}_value", _resolved(wanted, schema))
    before = writer.literal(f"{tool_format.start}\n<function={function['name']}>\n")
    after = writer.literal(f"</function>\n{tool_format.end}")
    yield f"call_{index}: {before} {' '.join(parts)} {after}"


def _xml_value(writer: LarkWriter, rule: str, schema: Mapping[str, Any]) -> str:
    end = "\n</parameter>\n"
    if "enum" in schema:
        texts = [v if isinstance(v, str) else json.dumps(v) for v in schema["enum"]]
        return f"{rule}: ({' | '.join(map(json.dumps, texts))}) {writer.literal(end)}"
    if schema.get("type", "string") == "string":  # its parser takes untyped values as text
        return f"{rule}[lazy]: {writer.until(end)}"
    return f"{rule}: {_json_rule(_closed(schema))} {writer.literal(end)}"


def _resolved(part: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A property's schema on its own: its `$ref` resolved, the definitions added."""
    schema = part if isinstance(part, Mapping) else {}  # it may be `true`
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    _, _, name = str(schema.get("$ref", "")).rpartition("/")
    targets = [each[name] for each in definitions.values() if name in each]
    return {**(targets[0] if targets else schema), **definitions}


def _closed(schema: Any) -> Any:
    """The schema with no other keys than it names, where it does not say: none are invented.

    An object that names no keys, or whose keys another part of the schema adds, stays open.
    """
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: _closed_part(key, value) for key, value in schema.items()}
    if schema.get("properties") and not _OPEN_KEYS & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _closed_part(key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
        return {name: _closed(each) for name, each in value.items()}
    return _closed(value) if key in ("items", "prefixItems", "anyOf", "oneOf") else value


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _GUIDANCE})}"


class LarkWriter:
    """Writes text as Lark; a token that was added to the vocabulary is written as its id."""

    def __init__(self, tokenizer: Any) -> None:
        self.added: dict[str, int] = tokenizer.get_added_vocab()
        names = sorted(self.added, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def literal(self, text: str) -> str:
        parts, end = [], 0
        for match in self._split.finditer(text):
            parts += [_quote(text[end : match.start()]), f"<[{self.added[match[0]]}]>"]
            end = match.end()
        return " ".join(part for part in [*parts, _quote(text[end:])] if part)

    def starts_with_token(self, text: str) -> bool:
        return self._split.match(text) is not None

    def has_token(self, text: str) -> bool:
        return self._split.search(text) is not None

    def without(self, excluded: str) -> str:
        """A terminal: one character or more of text that does not contain `excluded`."""
        return f"/(?s:.+)/ & ~/(?s:.*){_escape(excluded)}(?s:.*)/"

    def until(self, end: str) -> str:
        """The body of a rule: any text, then `end`. Make the rule lazy if `end` is plain text."""
        if self.starts_with_token(end):
            return f"/(?s:.*)/ {self.literal(end)}"  # a regex never matches such a token
        return f"/(?s:.*){_escape(end)}/"

    def thoughts(self, preamble: Preamble) -> Iterator[str]:
        """The rule `thoughts`, optional reasoning, and the rules it needs."""
        if not preamble.think_start:
            yield 'thoughts: ""'
            return
        lazy = "" if self.starts_with_token(preamble.think_end) else "[lazy]"
        yield f"thought{lazy}: {self.until(preamble.think_end)}"
        yield f"thoughts: ({self.literal(preamble.think_start)} thought)?"


def preamble_grammar(tokenizer: Any, preamble: Preamble) -> str:
    """A grammar for a preamble and then `@answer`, which is another grammar.

    Empty for an empty preamble.
    """
    if preamble == Preamble():
        return ""
    writer = LarkWriter(tokenizer)
    start = f"start: thoughts {writer.literal(preamble.header)} @answer"
    return "\n".join([start, *writer.thoughts(preamble)]) + "\n"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escape(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
