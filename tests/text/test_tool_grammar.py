"""Grammars that force a call: llguidance takes them, calls fit them, other answers do not."""

import json

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from keepwarm.errors import BadInput
from keepwarm.text.parsing import AnswerReader, Markup
from keepwarm.text.partial_calls import CallPiece
from keepwarm.text.request import ToolChoice
from keepwarm.text.tool_grammar import call_grammar, strict_grammar
from keepwarm.text.tools import STRICT, CallReader, call_text
from tests.kit.checkpoints import CHATML
from tests.kit.tokenizers import make
from tests.text.formats import (
    ARGUMENTS,
    CALLS,
    CLOCK,
    HARMONY_CALL,
    HARMONY_TOKENS,
    WEATHER,
    special_tokens,
)

REQUIRED = ToolChoice("required")
IN_JSON = {  # formats whose parser also accepts JSON between its delimiters
    "glm47": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "longcat": f'<longcat_tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n'
    "</longcat_tool_call>",
}
FORCED = {
    **{name: CALLS[name] for name in sorted(set(CALLS) - {"function_gemma"})},
    **IN_JSON,
    "laguna": IN_JSON["glm47"],
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    f'<|open|>json type="object"<|sep|>{ARGUMENTS}<|close|>json<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
}
NO_START = {"function_gemma", "kimi_k3"}  # calls that cannot be read or told from other text
STRICT_WEATHER = {**WEATHER, "function": {**WEATHER["function"], STRICT: True}}


def fits(markup, grammar, text, whole=True) -> bool:
    """Whether the grammar allows this text, and the answer to end after it."""
    hf = markup.tokenizer._tokenizer
    matcher = LLMatcher(from_tokenizer(hf), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = hf.encode(text, add_special_tokens=False)
    consumed = matcher.try_consume_tokens(tokens) == len(tokens)
    return consumed and (matcher.is_accepting() or not whole)


def names_read(markup, text):
    reader = AnswerReader(markup, calls=CallReader(markup.tool_format, [WEATHER, CLOCK]))
    tokens = markup.tokenizer.encode(text, add_special_tokens=False)
    tokens.append(markup.tokenizer.eos_token_id)
    pieces = [piece for token in tokens for piece in reader.add(token)] + reader.finish()
    return [getattr(p, "name", p) for p in pieces if not isinstance(p, CallPiece)]


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Markup:
    return Markup.of(make(tmp_path_factory.mktemp("ours"), template=CHATML))


@pytest.fixture(scope="module")
def thinker(tmp_path_factory) -> Markup:
    tokens = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    directory = tmp_path_factory.mktemp("thinker")
    return Markup.of(make(directory, tokens=tokens, parser="json_tools"))


def test_where_the_model_may_choose_there_is_no_grammar(ours):
    assert call_grammar([WEATHER], ToolChoice("auto"), ours) is None
    assert call_grammar([WEATHER], ToolChoice("none"), ours) is None


def markup_of(directory, parser, text) -> Markup:
    special = special_tokens(text) if parser != "qwen3_coder" else ["<tool_call>", "</tool_call>"]
    return Markup.of(make(directory, special=special, parser=parser))


@pytest.mark.parametrize("parser", FORCED)
def test_a_call_is_forced_in_the_models_own_format(tmp_path, parser):
    text = FORCED[parser]
    markup = markup_of(tmp_path, parser, text)
    grammar = call_grammar([WEATHER, CLOCK], REQUIRED, markup)
    assert fits(markup, grammar, text)
    assert not fits(markup, grammar, "It rains.", whole=False)
    assert not fits(markup, grammar, text.replace("get_weather", "get_whatever"))
    assert not fits(markup, grammar, text.replace("3", '"three"'))
    assert not fits(markup, grammar, text[:-3])
    assert names_read(markup, text) == ["get_weather"]


def test_the_format_of_older_mistral_models(tmp_path):
    markup = Markup.of(make(tmp_path, special=["[TOOL_CALLS]"], parser="mistral"))
    text = f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'
    assert fits(markup, call_grammar([WEATHER], REQUIRED, markup), text)
    assert names_read(markup, text) == ["get_weather"]


def test_the_channels_of_gpt_oss(tmp_path):
    special = [f"<|{name}|>" for name in HARMONY_TOKENS]
    markup = Markup.of(make(tmp_path, special=special))
    grammar = call_grammar([WEATHER], REQUIRED, markup)
    assert fits(markup, grammar, HARMONY_CALL)
    assert fits(markup, grammar, HARMONY_CALL.partition("assistant")[2])
    assert not fits(markup, grammar, "<|channel|>final<|message|>Rain.", whole=False)


@pytest.mark.parametrize("parser", sorted(set(CALLS) - set(FORCED)))
def test_a_format_that_cannot_be_forced_is_refused(tmp_path, parser):
    markup = Markup.of(make(tmp_path, special=special_tokens(CALLS[parser]), parser=parser))
    with pytest.raises(BadInput, match="tool_choice cannot force a call in the format"):
        call_grammar([WEATHER], REQUIRED, markup)


def test_our_own_format(ours):
    grammar = call_grammar([WEATHER, CLOCK], REQUIRED, ours)
    weather, clock = call_text("get_weather", ARGUMENTS), call_text("clock", "{}")
    assert fits(ours, grammar, weather)
    assert fits(ours, grammar, f"{weather}\n{clock}")
    assert not fits(ours, grammar, call_text("clock", '{"a": 1}'))
    assert not fits(ours, grammar, call_text("get_weather", '{"days": 3}'))


def test_a_named_tool_is_called_once(ours):
    grammar = call_grammar([WEATHER, CLOCK], ToolChoice("required", name="clock"), ours)
    clock = call_text("clock", "{}")
    assert fits(ours, grammar, clock)
    assert not fits(ours, grammar, f"{clock}\n{clock}")
    assert not fits(ours, grammar, call_text("get_weather", ARGUMENTS))


def test_one_call_where_several_are_not_wanted(ours):
    grammar = call_grammar([CLOCK], ToolChoice("required", parallel=False), ours)
    clock = call_text("clock", "{}")
    assert fits(ours, grammar, clock)
    assert not fits(ours, grammar, f"{clock}\n{clock}")


def test_a_tool_that_is_not_offered_cannot_be_forced(ours):
    with pytest.raises(BadInput, match="names a tool that is not in tools"):
        call_grammar([CLOCK], ToolChoice("required", name="other"), ours)
    with pytest.raises(BadInput, match="there are no tools"):
        call_grammar([], REQUIRED, ours)


def test_a_model_that_reasons_may_do_so_first(thinker):
    grammar = call_grammar([WEATHER], REQUIRED, thinker)
    call = CALLS["json_tools"]
    assert fits(thinker, grammar, call)
    assert fits(thinker, grammar, f"<think>\nHm.\n</think>\n\n{call}")
    assert fits(thinker, grammar, f"\n\n{call}")  # after reasoning that the prompt opened
    assert not fits(thinker, grammar, f"Hm. {call}")


def test_schemas_with_references_enumerations_and_unknown_words(tmp_path, ours):
    schema = {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["C", "F"]},
            "place": {"$ref": "#/$defs/place"},
            "note": {"type": "string", "format": "a format nobody knows"},
        },
        "required": ["unit", "place"],
        "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    grammar = call_grammar([tool], REQUIRED, ours)
    good = '{"unit": "C", "place": {"lat": 1.5}, "note": "x"}'
    assert fits(ours, grammar, call_text("f", good))
    assert not fits(ours, grammar, call_text("f", good.replace('"C"', '"K"')))
    xml = Markup.of(make(tmp_path, special=["<tool_call>", "</tool_call>"], parser="qwen3_coder"))
    grammar = call_grammar([tool], REQUIRED, xml)
    parts = [("unit", "C"), ("place", '{"lat": 1.5}'), ("note", "any <b>text</b>\nat all")]
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parts)
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    assert fits(xml, grammar, text)
    assert not fits(xml, grammar, text.replace("\nC\n", "\nK\n"))
    assert not fits(xml, grammar, text.replace("1.5", "x"))


def either(kind, key):
    """A schema of a parameter that may be null, as programs write it."""
    ways = [{"type": kind}, {"type": "null"}]
    return {"type": [kind, "null"]} if key == "type" else {key: ways, "description": "x"}


@pytest.mark.parametrize("parser", ["minicpm5", "minimax_m2", "qwen3_coder"])
@pytest.mark.parametrize("key", ["type", "anyOf", "oneOf"])
def test_what_may_be_null_is_otherwise_read_and_written_as_its_type(tmp_path, parser, key):
    """Where arguments are bare text, which only the schema tells from numbers."""
    properties = {"city": either("string", key), "days": either("integer", key)}
    schema = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    markup = markup_of(tmp_path, parser, CALLS[parser])
    grammar = call_grammar([tool], REQUIRED, markup)
    reader = CallReader(markup.tool_format, [tool])
    for city, days in (("12345", 3), ("true", None), (None, 3)):
        text = CALLS[parser].replace("3", json.dumps(days)).replace("Oslo", city or "null")
        assert fits(markup, grammar, text)
        body = text.removeprefix(markup.tool_format.start).removesuffix(markup.tool_format.end)
        (call,) = reader.read(body)
        assert json.loads(call.arguments) == {"city": city, "days": days}
    assert not fits(markup, grammar, CALLS[parser].replace("3", "three"))


def test_a_reference_that_may_be_null_is_written_as_what_it_refers_to(tmp_path):
    place = {"type": "object", "properties": {"lat": {"type": "number"}}}
    properties = {"city": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}}
    schema = {"type": "object", "properties": properties, "$defs": {"place": place}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    markup = markup_of(tmp_path, "qwen3_coder", "")
    grammar = call_grammar([tool], REQUIRED, markup)
    text = CALLS["qwen3_coder"].replace("<parameter=days>\n3\n</parameter>\n", "")
    for city, fit in (('{"lat": 1.5}', True), ("null", True), ("Oslo", False)):
        assert fits(markup, grammar, text.replace("Oslo", city)) is fit


def test_names_and_keys_cannot_break_out_of_the_grammar(ours):
    tool = {"type": "function", "function": {"name": 'a"b\\n', "parameters": {}}}
    grammar = call_grammar([tool], REQUIRED, ours)
    assert not fits(ours, grammar, call_text("clock", "{}"))


NESTED = {
    "type": "object",
    "properties": {
        "query": {"type": "object", "properties": {"text": {"type": "string"}}},
        "tags": {"type": "object"},
        "more": {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
    },
}


@pytest.mark.parametrize(
    ("arguments", "fit"),
    [
        ('{"query": {"text": "x"}}', True),
        ('{"query": {"text": "x", "invented": 1}}', False),
        ('{"invented": 1}', False),
        ('{"tags": {"any": 1}}', True),
        ('{"more": {"a": 1, "any": 1}}', True),
    ],
)
def test_no_keys_are_invented_where_a_schema_names_its_own(ours, arguments, fit):
    tool = {"type": "function", "function": {"name": "find", "parameters": NESTED}}
    assert fits(ours, call_grammar([tool], REQUIRED, ours), call_text("find", arguments)) is fit


@pytest.mark.parametrize(
    ("schema", "fit"),
    [
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, True),
        ({"type": "object"}, True),
    ],
)
def test_a_function_without_parameters_gets_none(ours, schema, fit):
    tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
    grammar = call_grammar([tool], REQUIRED, ours)
    assert fits(ours, grammar, call_text("find", "{}"))
    assert fits(ours, grammar, call_text("find", '{"invented": 1}')) is fit


# Strict tools: free text, and calls by their schemas


def test_without_a_strict_tool_there_is_no_grammar(ours):
    assert strict_grammar([WEATHER, CLOCK], ours) is None
    assert strict_grammar([], ours) is None


@pytest.mark.parametrize("parser", sorted(set(CALLS) - NO_START))
@pytest.mark.parametrize("is_token", [True, False])
def test_a_strict_call_follows_its_schema_and_text_is_free(tmp_path, parser, is_token):
    """Be its start one token or plain text."""
    text = CALLS[parser]
    if not is_token and parser == "mistral":
        text = f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'
    markup = markup_of(tmp_path, parser, text if is_token else "")
    grammar = strict_grammar([STRICT_WEATHER, CLOCK], markup)
    for answer in ("It rains <b>.", text, f"Let me see.\n{text}", f"{text}\n{text} So."):
        assert fits(markup, grammar, answer), answer
    assert names_read(markup, text) == ["get_weather"]
    for wrong in ("get_whatever", "clock"):
        assert not fits(markup, grammar, "So: " + text.replace("get_weather", wrong))
    assert not fits(markup, grammar, "So: " + text.replace("3", '"three"'))
    assert not fits(markup, grammar, text.replace("city", "town"))


def test_strict_calls_after_reasoning_in_channels(tmp_path):
    markup = Markup.of(make(tmp_path, special=[f"<|{name}|>" for name in HARMONY_TOKENS]))
    grammar = strict_grammar([STRICT_WEATHER], markup)
    assert fits(markup, grammar, "<|channel|>final<|message|>Rain.")
    assert fits(markup, grammar, HARMONY_CALL)
    assert not fits(markup, grammar, HARMONY_CALL.replace("3", '"three"'))


@pytest.mark.parametrize("parser", sorted(NO_START))
def test_where_a_call_cannot_be_told_it_is_free(tmp_path, parser):
    assert strict_grammar([STRICT_WEATHER], markup_of(tmp_path, parser, CALLS[parser])) is None


@pytest.mark.parametrize("parser", ["gemma4", "pythonic", "minimax_m2"])
def test_arguments_that_are_not_required_may_be_left_out(tmp_path, parser):
    """Wherever they are; separators are only between those that are there."""
    text = CALLS[parser]
    markup = markup_of(tmp_path, parser, text)
    properties = {name: {"type": "integer"} for name in ("a", "days", "z")}
    for required in ([], None, ["days"]):
        schema = {"type": "object", "properties": properties, "required": required}
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
        grammar = call_grammar([tool], REQUIRED, markup)
        call = {
            "gemma4": "<|tool_call>call:get_weather{%s}<tool_call|>",
            "pythonic": "<|tool_call_start|>[get_weather(%s)]<|tool_call_end|>",
            "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n%s</invoke>\n'
            "</minimax:tool_call>",
        }[parser]
        written = {"gemma4": "{}:1", "pythonic": "{}=1"}.get(
            parser, '<parameter name="{}">1</parameter>\n'
        )
        separator = {"gemma4": ",", "pythonic": ", "}.get(parser, "")

        def said(*names, call=call, written=written, separator=separator):
            return call % separator.join(written.format(name) for name in names)

        assert fits(markup, grammar, said("a", "days", "z"))
        assert fits(markup, grammar, said("days"))
        assert fits(markup, grammar, said("days", "z"))
        assert fits(markup, grammar, said()) is (not required)
        assert fits(markup, grammar, said("a", "z")) is (not required)
        assert not fits(markup, grammar, said("z", "days"))


DEEP = {
    "type": "object",
    "properties": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "lat": {"type": "number"}},
            "required": ["name", "lat"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string"}},
        "until": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "file-path": {"type": ["string", "null"]},
        "tree": {"$ref": "#/$defs/tree"},
        "extra": {"type": "object"},
    },
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "leaf": {"type": "string"},
                "rest": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
        }
    },
}
HARD = "a {, b: [<} c"  # what JSON in its place would be taken for
GEMMA_WRITTEN = {
    f'place:{{name:<|"|>{HARD}<|"|>,lat:1.5}}': {"place": {"name": HARD, "lat": 1.5}},
    f'tags:[<|"|>{HARD}<|"|>,<|"|>y<|"|>],until:null': {"tags": [HARD, "y"], "until": None},
    'tags:[],until:3,"file-path":<|"|>x<|"|>': {"tags": [], "until": 3, "file-path": "x"},
    'tree:{leaf:<|"|>a<|"|>,rest:[{leaf:<|"|>,b:c<|"|>},{}]}': {
        "tree": {"leaf": "a", "rest": [{"leaf": ",b:c"}, {}]}
    },
    'extra:{any:[1,true,{deep:<|"|>,x:{<|"|>}]}': {"extra": {"any": [1, True, {"deep": ",x:{"}]}},
}
GEMMA_WRONG = (
    f'place:{{"name": "{HARD}", "lat": 1.5}}',
    "place:{lat:1.5}",
    'place:{name:<|"|>x<|"|>,lat:1.5,more:1}',
    "tags:[1]",
    "tree:{rest:[{leaf:1}]}",
    "until:1.5",
)


@pytest.mark.parametrize("written", GEMMA_WRITTEN)
def test_nested_arguments_of_gemma_are_written_as_its_parser_reads_them(tmp_path, written):
    """Not as JSON, whose texts it takes for braces and keys."""
    text = f"<|tool_call>call:get_weather{{{written}}}<tool_call|>"
    markup = markup_of(tmp_path, "gemma4", CALLS["gemma4"])
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": DEEP}}
    strict = {**tool, "function": {**tool["function"], STRICT: True}}
    assert fits(markup, call_grammar([tool], REQUIRED, markup), text)
    assert fits(markup, strict_grammar([strict], markup), text)
    (call,) = CallReader(markup.tool_format, [tool]).read(text.partition(">")[2])
    assert json.loads(call.arguments) == GEMMA_WRITTEN[written]


@pytest.mark.parametrize("written", GEMMA_WRONG)
def test_nested_arguments_of_gemma_follow_their_schema(tmp_path, written):
    markup = markup_of(tmp_path, "gemma4", CALLS["gemma4"])
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": DEEP}}
    text = f"<|tool_call>call:get_weather{{{written}}}<tool_call|>"
    assert not fits(markup, call_grammar([tool], REQUIRED, markup), text)
