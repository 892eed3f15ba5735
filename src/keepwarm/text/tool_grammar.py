"""Grammars that force a tool call, in the format that the model itself writes.

A grammar is Lark as llguidance reads it: the marks of the format as they stand, the arguments by
the tool's JSON schema. Spaces are those that templates write, so that the next prompt, in which
the call stands rendered, begins with the very tokens that were generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from keepwarm.errors import BadInput
from keepwarm.text.lark import Writer
from keepwarm.text.parsing import Markup
from keepwarm.text.request import Tool, ToolChoice
from keepwarm.text.tools import HARMONY, ToolFormat

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GUIDANCE = {**_SPACES, "lenient": True}  # a keyword it does not know is left out, not refused
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}


class Frame(NamedTuple):
    """What stands around the name and the JSON arguments of a call."""

    before: str
    between: str
    after: str
    joint: str | None = "\n"  # between two calls; None: only one can be written
    open: str = ""  # before the first call
    close: str = ""


_FRAMES = {
    "[TOOL_CALLS]": Frame("[TOOL_CALLS]", "[ARGS]", "", joint=""),
    "<|tool_calls_section_begin|>": Frame(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
        joint=None,  # the number behind the name counts the calls
    ),
    HARMONY.start: Frame(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", joint=None
    ),
}
_LIST = Frame('{"name": "', '", "arguments": ', "}", ", ", open="[TOOL_CALLS][", close="]")


def call_grammar(tools: Sequence[Tool], choice: ToolChoice, markup: Markup) -> str | None:
    """A grammar for an answer that must be a call; None where the model may choose.

    A model that thinks may do so first. Where the prompt has opened its thoughts already, the
    grammar begins behind their end.
    """
    if choice.mode != "required" and choice.name is None:
        return None
    if not tools:
        raise BadInput("tool_choice asks for a call and there are no tools; offer some.")
    wanted = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not wanted:
        raise BadInput(f"tool_choice asks for {choice.name!r}, which is not offered.")
    writer = Writer(markup.tokenizer)
    several = choice.parallel and choice.name is None
    blanks = "/[ \\n]{0,4}/" if markup.lead.think else ""
    rules = [*_calls(writer, markup.tools, wanted, several), *writer.thoughts(markup.lead)]
    return "\n".join([f"start: thoughts {blanks} calls", *rules]) + "\n"


def callless_grammar(markup: Markup) -> str | None:
    """A grammar for an answer in which no call begins; None where its mark is not plain text."""
    writer = Writer(markup.tokenizer)
    mark = markup.tools.start
    if writer.has_token(mark):
        return None
    stops = markup.tokenizer.eos_token_ids
    added = [str(token) for token in sorted(writer.added.values()) if token not in stops]
    rules = [f"added: <[{','.join(added)}]>"] if added else []
    start = "start: TEXT? (added TEXT?)*" if added else "start: TEXT?"
    return "\n".join([start, *rules, f"TEXT: {writer.without(mark)}"]) + "\n"


def _calls(
    writer: Writer, tool_format: ToolFormat, tools: Sequence[Tool], several: bool
) -> Iterator[str]:
    """The rules of `calls`: one call or, where that is allowed, several."""
    frame = _frame(writer, tool_format)
    if frame is None and not _reads_xml(tool_format):
        raise BadInput(
            f"tool_choice cannot force a call in the format of this model ({tool_format.start} …); "
            "use tool_choice auto."
        )
    around = frame or Frame("", "", "")
    more = f"({writer.literal(around.joint or '')} call)*"
    more = more if several and around.joint is not None else ""
    yield f"calls: {writer.literal(around.open)} call {more} {writer.literal(around.close)}"
    yield "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))
    for index, tool in enumerate(tools):
        if frame is not None:
            yield _framed(writer, frame, index, tool["function"])
        else:
            yield from _xml(writer, tool_format, index, tool["function"])


def _frame(writer: Writer, tool_format: ToolFormat) -> Frame | None:
    """The frame that this format's own reader understands, if there is one."""
    plain = Frame(f'{tool_format.start}\n{{"name": "', '", "arguments": ', f"}}\n{tool_format.end}")
    frame = _FRAMES.get(tool_format.start, plain)
    if tool_format.start == "[TOOL_CALLS]" and "[ARGS]" not in writer.added:
        frame = _LIST
    text = f'{frame.open}{frame.before}f{frame.between}{{"a": 1}}{frame.after}{frame.close}'
    return frame if _reads(tool_format, text) else None


def _reads_xml(tool_format: ToolFormat) -> bool:
    call = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    return _reads(tool_format, f"{tool_format.start}\n{call}\n{tool_format.end}")


def _reads(tool_format: ToolFormat, text: str) -> bool:
    """Whether this text is read as f(a=1); a reader may raise anything on another format."""
    properties = {"a": {"type": "integer"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    body = text.partition(tool_format.start)[2].removesuffix(tool_format.end)
    try:
        parsed = tool_format.parse(body, tools)
        call = parsed[0] if isinstance(parsed, list) else parsed
        return bool(call["name"] == "f" and call["arguments"] == {"a": 1})
    except Exception:
        return False


def _framed(writer: Writer, frame: Frame, index: int, function: Mapping[str, Any]) -> str:
    before = writer.literal(frame.before + function["name"] + frame.between)
    schema = function.get("parameters") or _NO_PARAMETERS
    arguments = _json_rule({**schema, "type": "object"})
    return f"call_{index}: {before} {arguments} {writer.literal(frame.after)}"


def _xml(
    writer: Writer, tool_format: ToolFormat, index: int, function: Mapping[str, Any]
) -> Iterator[str]:
    """Parameters in the order of the schema; a string stands bare, all else as JSON."""
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


def _xml_value(writer: Writer, rule: str, schema: Mapping[str, Any]) -> str:
    end = "\n</parameter>\n"
    if "enum" in schema:
        texts = [v if isinstance(v, str) else json.dumps(v) for v in schema["enum"]]
        return f"{rule}: ({' | '.join(map(json.dumps, texts))}) {writer.literal(end)}"
    if schema.get("type", "string") == "string":  # its reader takes the untyped as it stands
        return f"{rule}[lazy]: {writer.until(end)}"
    return f"{rule}: {_json_rule(schema)} {writer.literal(end)}"


def _resolved(part: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema that stands alone: what it refers to is put in or comes along."""
    schema = part if isinstance(part, Mapping) else {}  # it may be `true`
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    _, _, name = str(schema.get("$ref", "")).rpartition("/")
    targets = [each[name] for each in definitions.values() if name in each]
    return {**(targets[0] if targets else schema), **definitions}


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _GUIDANCE})}"
