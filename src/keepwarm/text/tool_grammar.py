"""Grammars that Keepwarm writes: calls, an answer with or without them, reasoning before it.

They are Lark as llguidance reads it: delimiters as tokens, the arguments of a call by the tool's
JSON schema. A call has the format that the model itself writes. Spaces are those that templates
write, so that the next prompt, with the call rendered into it, begins with the tokens that were
generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from keepwarm.errors import BadField, BadInput
from keepwarm.text.grammar import OPEN_KEYS, closed, properties_of, required_of
from keepwarm.text.parsing import Markup, Preamble
from keepwarm.text.request import Tool, ToolChoice
from keepwarm.text.tools import HARMONY, STRICT, UNKNOWN_TOOL, parses, without_null

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GUIDANCE = {**_SPACES, "lenient": True}  # unknown schema keywords are ignored, not refused
_ATOM: Mapping[str, Any] = {"type": ["number", "boolean", "null"]}
_PLAIN = ("string", "integer", "number", "boolean", "null")
_WAYS = ("enum", "anyOf", "oneOf")
_BARE_KEY = re.compile(r"\w+")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}


class Parameters(NamedTuple):
    """Arguments that are written one by one: strings bare or quoted, all else as JSON.

    Where `is_nested`, objects in them are written as they are: keys bare, strings quoted.
    """

    before: str  # the name of one
    between: str
    after: str  # its value
    separator: str = ""  # between two
    quote: str = ""  # on both sides of a string
    is_nested: bool = False


class CallSyntax(NamedTuple):
    """The text of a call between the delimiters of its format, around name and arguments."""

    before: str
    between: str
    after: str
    parameters: Parameters | None = None  # None: the arguments are one JSON object
    separator: str | None = "\n"  # between two calls; None: one call only
    lead: str = ""  # before the first delimiter
    is_list: bool = False  # several calls between two delimiters


_JSON = CallSyntax('\n{"name": "', '", "arguments": ', "}\n")
_LIST = CallSyntax('{"name": "', '", "arguments": ', "}", separator=None, is_list=True)
_SYNTAXES = {  # by the delimiter that begins a call
    "[TOOL_CALLS]": CallSyntax("", "[ARGS]", "", separator=""),
    "<|tool_calls_section_begin|>": CallSyntax(
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        separator=None,  # the number after the name counts the calls
    ),
    "<|open|>tools<|sep|>": CallSyntax(
        '<|open|>call tool="',
        '" index="1"<|sep|><|open|>json type="object"<|sep|>',
        "<|close|>json<|sep|><|close|>call<|sep|>",
        separator=None,
    ),
    HARMONY.start: CallSyntax(
        "",
        " <|constrain|>json<|message|>",
        "",
        separator=None,
        lead="<|channel|>commentary ",
    ),
    "<|tool_call>": CallSyntax("call:", "{", "}", Parameters("", ":", "", ",", '<|"|>', True)),
    "<|tool_call_start|>": CallSyntax("[", "(", ")]", Parameters("", "=", "", ", ", '"')),
    "<function name=": CallSyntax('"', '">', "", Parameters('<param name="', '">', "</param>")),
    "<minimax:tool_call>": CallSyntax(
        '\n<invoke name="',
        '">\n',
        "</invoke>\n",
        Parameters('<parameter name="', '">', "</parameter>\n"),
    ),
    "<atem:function_calls>": CallSyntax(
        '\n<atem:invoke name="',
        '">\n',
        "</atem:invoke>\n",
        Parameters('<atem:parameter name="', '">', "</atem:parameter>\n"),
    ),
    "<longcat_tool_call>": CallSyntax(
        "",
        "",
        "",
        Parameters(
            "<longcat_arg_key>",
            "</longcat_arg_key><longcat_arg_value>",
            "</longcat_arg_value>",
        ),
    ),
}
_IN_TOOL_CALL = (  # what else begins with <tool_call>: GLM's, Qwen3-Coder's
    CallSyntax("", "", "", Parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>")),
    CallSyntax(
        "\n<function=",
        ">\n",
        "</function>\n",
        Parameters("<parameter=", ">\n", "\n</parameter>\n"),
    ),
)


def call_grammar(tools: Sequence[Tool], choice: ToolChoice, markup: Markup) -> str | None:
    """A grammar for an answer that must be a call; None where the model may choose.

    A model that reasons may do so first. If the prompt has already opened the reasoning, the
    grammar applies after its end.
    """
    if not choice.is_forced:
        return None
    if not tools:
        raise BadField(
            "tool_choice asks for a call, but there are no tools; send some.", "tool_choice"
        )
    wanted = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not wanted:
        raise BadField(UNKNOWN_TOOL, "tool_choice")
    writer = CallWriter(markup, is_forced=True)
    if writer.syntax is None:
        raise BadInput(
            f"tool_choice cannot force a call in the format of this model "
            f"({markup.tool_format.start} …); use tool_choice auto."
        )
    several = choice.parallel and choice.name is None
    rules = [*writer.calls(wanted, several), *writer.thoughts(markup.preamble)]
    return "\n".join([f"start: thoughts {_blanks(markup.preamble)} calls", *rules]) + "\n"


def answer_grammar(
    markup: Markup, preamble: Preamble, tools: Sequence[Tool] = (), several: bool = True
) -> str:
    """A grammar for a preamble and then `@answer`, which is another grammar, or calls of tools.

    Empty if there is nothing but the answer.
    """
    if preamble == Preamble() and not tools:
        return ""
    writer = CallWriter(markup)
    ways = [f"{writer.literal(preamble.header)} @answer"]
    rules = [*writer.thoughts(preamble)]
    if tools:
        ways.append(f"{_blanks(markup.preamble)} calls")
        rules += writer.calls(tools, several)
    return "\n".join([f"start: thoughts ({' | '.join(ways)})", *rules]) + "\n"


def no_call_grammar(markup: Markup) -> str | None:
    """A grammar for an answer without calls; None if calls do not start with plain text."""
    writer = CallWriter(markup)
    if writer.has_token(markup.tool_format.start):
        return None
    return "\n".join(["start: free", *writer.free_text()]) + "\n"


def strict_grammar(tools: Sequence[Tool], markup: Markup) -> str | None:
    """A grammar for free text, and calls by their schemas wherever one begins in it.

    None if no tool is strict, or where the start of a call cannot be told from other text.
    """
    writer, start = CallWriter(markup), markup.tool_format.start
    if not any(tool["function"].get(STRICT) for tool in tools) or writer.syntax is None:
        return None
    if writer.has_token(start) and start not in writer.added:
        return None
    rules = [
        "start: (before_call body)* free",
        *writer.free_up_to("before_call", start),
        *writer.free_text(),
        *writer.body(tools),
    ]
    return "\n".join(rules) + "\n"


def _blanks(preamble: Preamble) -> str:
    """Between reasoning and a call."""
    return "/[ \\n]{0,4}/" if preamble.think_start else ""


def _resolved(part: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A property's schema on its own: its `$ref` resolved, the definitions added."""
    schema = _sound(part)
    named = {key: root.get(key) for key in ("$defs", "definitions")}
    definitions = {key: each for key, each in named.items() if isinstance(each, Mapping)}
    _, _, name = str(schema.get("$ref", "")).rpartition("/")
    found = (each.get(name) for each in definitions.values())
    targets = [each for each in found if isinstance(each, Mapping)]
    return {**(_sound(targets[0]) if targets else schema), **definitions}


def _sound(part: Any) -> dict[str, Any]:
    """A schema as an object, which may be `true`; without lists of ways that are no lists."""
    given = part.items() if isinstance(part, Mapping) else ()
    return {key: value for key, value in given if key not in _WAYS or isinstance(value, list)}


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether an object may have other keys than it names."""
    return any(schema.get(key) for key in OPEN_KEYS)


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
        """The body of a rule: any text, then `end`. The rule is `lazy` if `end` is plain text."""
        if self.starts_with_token(end):
            return f"/(?s:.*)/ {self.literal(end)}"  # a regex never matches such a token
        return f"/(?s:.*){_escape(end)}/"

    def lazy(self, end: str) -> str:
        return "" if self.starts_with_token(end) else "[lazy]"

    def thoughts(self, preamble: Preamble) -> Iterator[str]:
        """The rule `thoughts`, optional reasoning, and the rules it needs."""
        if not preamble.think_start:
            yield 'thoughts: ""'
            return
        end = preamble.think_end
        yield f"thought{self.lazy(end)}: {self.until(end)}"
        yield f"thoughts: ({self.literal(preamble.think_start)} thought)?"


class CallWriter(LarkWriter):
    """Writes the rules of calls in a model's format, and of the text around them."""

    def __init__(self, markup: Markup, *, is_forced: bool = False) -> None:
        super().__init__(markup.tokenizer)
        self._format = markup.tool_format
        self.syntax = self._find_syntax(is_forced)  # None: its parser reads none that is known
        ends = set(markup.tokenizer.eos_token_ids)
        around = [each for each in (self._format.start, self._format.end) if each]
        self._others = [  # tokens that free text may have, which no regex matches
            token
            for name, token in sorted(self.added.items())
            if token not in ends and not any(each in name for each in around)
        ]

    def _find_syntax(self, is_forced: bool) -> CallSyntax | None:
        """The model's own; a forced call is JSON where its parser reads that too: it streams."""
        start = self._format.start
        own = _SYNTAXES.get(start)
        if own is None:
            candidates = [_JSON, *_IN_TOOL_CALL]
        elif start == "[TOOL_CALLS]" and "[ARGS]" not in self.added:
            candidates = [_LIST]
        else:
            candidates = [_JSON, own]
        found = [each for each in candidates if parses(self._format.parse, _example(each))]
        return found[0 if is_forced else -1] if found else None

    def calls(self, tools: Sequence[Tool], several: bool) -> Iterator[str]:
        """The rule `calls`, one call or several if allowed, and the rules it needs."""
        syntax = self.syntax
        start = self.literal((syntax.lead if syntax else "") + self._format.start)
        separator = syntax.separator if syntax else None
        more = f"({self.literal(separator)} {start} body)*" if separator is not None else ""
        yield f"calls: {start} body {more if several else ''}"
        yield from self.body(tools, several)

    def body(self, tools: Sequence[Tool], several: bool = True) -> Iterator[str]:
        """The rule `body`, what follows the start of a call; of an unknown syntax any text."""
        syntax, end = self.syntax, self._format.end
        if syntax is None:
            yield from self.free_up_to("body", end)
            yield from self.free_text()
            return
        more = '(", " call)*' if several else ""
        call = f'"[" call {more} "]"' if syntax.is_list else "call"
        yield f"body: {call} {self.literal(end)}"
        yield "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))
        if syntax.parameters and syntax.parameters.is_nested:
            yield from self._any_value(syntax.parameters)
        for index, tool in enumerate(tools):
            yield from self._call(f"call_{index}", syntax, tool["function"])

    def _call(self, rule: str, syntax: CallSyntax, function: Mapping[str, Any]) -> Iterator[str]:
        before = self.literal(syntax.before + function["name"] + syntax.between)
        schema = function.get("parameters") or _NO_PARAMETERS
        yield f"{rule}: {before} {rule}_arguments {self.literal(syntax.after)}"
        if syntax.parameters is not None:
            named, definitions = self._definitions(rule, syntax.parameters, schema)
            yield from self._parameters(f"{rule}_arguments", syntax.parameters, schema, named)
            yield from definitions if syntax.parameters.is_nested else ()
            return
        if schema.get("properties") == {} and not OPEN_KEYS & schema.keys():
            schema = _NO_PARAMETERS  # as a function without any is commonly written
        yield f"{rule}_arguments: {_json_rule(closed({**schema, 'type': 'object'}))}"

    def _parameters(
        self,
        rule: str,
        form: Parameters,
        schema: Mapping[str, Any],
        named: Mapping[str, str] = MappingProxyType({}),
    ) -> Iterator[str]:
        """Those of the schema in its order; one that is not required may be left out."""
        properties, names = properties_of(schema), required_of(schema)
        required = [name in names for name in properties]
        rules = [f"{rule}_{number}" for number in range(len(properties))]
        separated = [f"({self.literal(form.separator)} {each})" for each in rules]
        later = [f"{r}{'' if must else '?'}" for r, must in zip(separated, required, strict=True)]
        n_firsts = required.index(True) + 1 if any(required) else len(rules)
        ways = [" ".join([rules[i], *later[i + 1 :]]) for i in range(n_firsts)]
        yield f"{rule}: " + " | ".join(ways if any(required) else [*ways, '""'])
        for each, (name, wanted) in zip(rules, properties.items(), strict=True):
            key = json.dumps(name) if form.is_nested and not _BARE_KEY.fullmatch(name) else name
            yield f"{each}: {self.literal(form.before + key + form.between)} {each}_value"
            if form.is_nested:
                yield from self._nested(f"{each}_value", form, wanted, named)
            else:
                yield self._value(f"{each}_value", form, _resolved(wanted, schema))

    def _definitions(
        self, rule: str, form: Parameters, schema: Mapping[str, Any]
    ) -> tuple[dict[str, str], list[str]]:
        """The rule of each definition in a schema by how it is referred to; these rules."""
        named = {
            f"#/{key}/{name}": (f"{rule}_{key.strip('$')}_{number}", part)
            for key in ("$defs", "definitions")
            if isinstance(schema.get(key), Mapping)
            for number, (name, part) in enumerate(schema[key].items())
        }
        rules = {ref: each for ref, (each, _) in named.items()}
        found = [self._nested(each, form, part, rules) for each, part in named.values()]
        return rules, [line for lines in found for line in lines]

    def _nested(
        self, rule: str, form: Parameters, part: Any, named: Mapping[str, str]
    ) -> Iterator[str]:
        """A value in the form's own way; as JSON its texts could be taken for braces and keys."""
        schema = _sound(part)
        kind, items = schema.get("type"), schema.get("items")
        ways = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(kind, list):
            ways = [{**schema, "type": each} for each in kind]
        if "$ref" in schema:
            yield f"{rule}: {named.get(str(schema['$ref']), 'any_value')}"
        elif ways and "enum" not in schema:
            rules = [f"{rule}_{number}" for number in range(len(ways))]
            yield f"{rule}: {' | '.join(rules)}"
            for each, way in zip(rules, ways, strict=True):
                yield from self._nested(each, form, way, named)
        elif kind == "object" and properties_of(schema) and not _is_open(schema):
            yield f'{rule}: "{{" {rule}_of "}}"'
            yield from self._parameters(f"{rule}_of", form, schema, named)
        elif kind == "array" and isinstance(items, Mapping):
            yield f'{rule}: "[" ({rule}_item ("," {rule}_item)*)? "]"'
            yield from self._nested(f"{rule}_item", form, items, named)
        elif "enum" in schema or kind in _PLAIN:
            yield self._value(rule, form, schema)
        else:
            yield f"{rule}: any_value"

    def _any_value(self, form: Parameters) -> Iterator[str]:
        """The rule `any_value`, for what no schema describes, and the rules it needs."""
        yield f"any_value: any_object | any_list | any_text | {_json_rule(_ATOM)}"
        yield 'any_object: "{" (any_pair ("," any_pair)*)? "}"'
        yield 'any_pair: /\\w+/ ":" any_value'
        yield 'any_list: "[" (any_value ("," any_value)*)? "]"'
        yield self._value("any_text", form, {"type": "string"})

    def _value(self, rule: str, form: Parameters, schema: Mapping[str, Any]) -> str:
        end, quote = form.after, form.quote
        is_json = self._format.header is not None
        plain = schema if is_json else _resolved(without_null(schema), schema)
        is_text = plain.get("type", "string") == "string"  # parsers take untyped values as text
        if quote == '"' or not (is_text or "enum" in schema):
            return f"{rule}: {_json_rule(closed(schema))} {self.literal(end)}"
        if "enum" in schema:
            texts = [
                f"{quote}{v}{quote}" if isinstance(v, str) else json.dumps(v)
                for v in schema["enum"]
            ]
            return f"{rule}: ({' | '.join(map(self.literal, texts))}) {self.literal(end)}"
        if quote:
            text = self._value(f"{rule}_text", form._replace(after=quote + end, quote=""), schema)
            return f"{rule}: {self.literal(quote)} {rule}_text\n{text}"
        return f"{rule}{self.lazy(end)}: {self.until(end)}"

    def free_text(self) -> Iterator[str]:
        """The rule `free`, text without the start of a call, and the rules it needs."""
        yield "free: TEXT? (added TEXT?)*"
        tokens = ",".join(map(str, self._others))
        yield f"added: <[{tokens}]>" if tokens else "added: TEXT"
        yield f"TEXT: {self.without(self._format.start)}"

    def free_up_to(self, rule: str, end: str) -> Iterator[str]:
        """A rule for free text and then `end`."""
        yield f"{rule}: (TEXT? added)* {rule}_end"
        yield f"{rule}_end{self.lazy(end)}: {self.until(end)}"


def _example(syntax: CallSyntax) -> str:
    """The call f(a=1), without delimiters."""
    form = syntax.parameters
    arguments = '{"a": 1}' if form is None else f"{form.before}a{form.between}1{form.after}"
    call = f"{syntax.before}f{syntax.between}{arguments}{syntax.after}"
    return f"[{call}]" if syntax.is_list else call


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escape(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
