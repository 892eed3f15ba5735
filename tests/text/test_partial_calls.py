"""Calls while they are written: what is sent of them is what they are at their end."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from keepwarm.text.parsing import AnswerReader, AnswerText, Markup
from keepwarm.text.partial_calls import CallPiece, JsonPieces
from keepwarm.text.request import ToolCall
from keepwarm.text.template import MAX_DEPTH
from keepwarm.text.tools import CallReader, call_text
from tests.kit.checkpoints import CHATML
from tests.kit.tokenizers import make
from tests.text.formats import ARGUMENTS, CALLS, CLOCK, HARMONY_CALL, HARMONY_TOKENS, WEATHER
from tests.text.formats import special_tokens as special
from tests.text.test_tool_grammar import IN_JSON

REPEATABLE = settings(deadline=None, derandomize=True, database=None, max_examples=50)
STREAMED = {"json_tools", "kimi_k2", "mistral"}
TEXT = st.text('az09 "\\/{}[]:,\n\x00\x7féß漢🦊\u2028', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
STYLES = st.fixed_dictionaries(
    {"indent": st.sampled_from([None, 2]), "ensure_ascii": st.booleans()}
)


def rewritten(text, cuts):
    reader, parts, begin = JsonPieces(), [], 0
    for end in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        parts.append(reader.add(text[begin:end]))
        begin = end
    return reader, "".join(parts)


@REPEATABLE
@given(
    value=st.dictionaries(TEXT, VALUES, max_size=4),
    style=STYLES,
    cuts=st.lists(st.integers(0, 999), max_size=6),
)
@example(value={"a": '🦊\x00"\\/'}, style={"ensure_ascii": True}, cuts=[10, 12, 15, 18])
def test_json_is_rewritten_however_it_is_cut(value, style, cuts):
    text = json.dumps(value, **style)
    reader, said = rewritten(text + "}", cuts)
    assert said == json.dumps(value, ensure_ascii=False)
    assert reader.is_complete
    assert not reader.is_broken


@REPEATABLE
@given(
    value=st.dictionaries(TEXT, VALUES, max_size=4),
    at=st.integers(0, 99),
    wrong=st.sampled_from(
        ["", ",", "}", "]", ":", "nul", '"', "\\ud83d", "\\q", "\n", "1e999", "x"]
    ),
)
def test_what_was_said_can_be_read_whatever_follows(value, at, wrong):
    """SDKs read arguments while they arrive: they must never see what cannot become JSON."""
    text = json.dumps(value)
    at %= len(text)
    reader, said = rewritten(text[:at] + wrong + text[at:] + "}}", range(0, 999, 7))
    assert not said or isinstance(from_json(said, allow_partial="trailing-strings"), dict)
    if reader.is_complete:
        assert json.dumps(json.loads(said), ensure_ascii=False) == said or wrong


def pieces_of(markup, text, *, parallel=True, ended=False):
    reader = AnswerReader(
        markup, calls=CallReader(markup.tool_format, [WEATHER, CLOCK], parallel=parallel)
    )
    tokens = markup.tokenizer.encode(text, add_special_tokens=False)
    tokens += [markup.tokenizer.eos_token_id] * ended
    return [piece for token in tokens for piece in reader.add(token)] + reader.finish()


def calls_in(pieces):
    return [piece for piece in pieces if isinstance(piece, ToolCall)]


def joined(pieces):
    """The pieces of calls, joined by id."""
    calls = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            said = calls.get(piece.id, ToolCall(piece.id, piece.name, ""))
            calls[piece.id] = said._replace(arguments=said.arguments + piece.arguments)
    return list(calls.values())


@pytest.mark.parametrize("parser", CALLS)
def test_a_call_in_each_format_of_mlx_lm_is_read_or_stays_text(tmp_path, parser):
    """Its arguments come while they are written where they are JSON; cut off, no text is lost."""
    text = CALLS[parser]
    markup = Markup.of(make(tmp_path, special=special(text), parser=parser))
    assert markup.tool_format.native
    pieces = pieces_of(markup, f"Well.\n{text}", ended=True)
    assert [(call.name, call.arguments) for call in calls_in(pieces)] == [
        ("get_weather", ARGUMENTS)
    ]
    for end in range(1, len(text), 7):
        cut = pieces_of(markup, text[:end])
        assert "".join(p.text for p in cut if isinstance(p, AnswerText)) == text[:end]
        assert not calls_in(cut)
    assert joined(pieces) == (calls_in(pieces) if parser in STREAMED else [])
    if parser in STREAMED:
        assert sum(isinstance(piece, CallPiece) for piece in pieces) > 5


@pytest.mark.parametrize("parser", [*IN_JSON, "laguna"])
def test_a_forced_call_in_json_streams_too(tmp_path, parser):
    text = IN_JSON.get(parser, IN_JSON["glm47"])
    pieces = pieces_of(Markup.of(make(tmp_path, parser=parser)), text)
    assert joined(pieces) == calls_in(pieces) != []


def test_the_channels_of_gpt_oss_stream(tmp_path):
    markup = Markup.of(make(tmp_path, special=[f"<|{name}|>" for name in HARMONY_TOKENS]))
    calls = CallReader(markup.tool_format, [WEATHER])
    reader = AnswerReader(markup, calls=calls, segment=markup.first_segment)
    tokens = markup.tokenizer.encode(HARMONY_CALL, add_special_tokens=False)
    pieces = [piece for token in tokens for piece in reader.add(token)] + reader.finish()
    assert joined(pieces) == calls_in(pieces) != []


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Markup:
    return Markup.of(make(tmp_path_factory.mktemp("ours"), template=CHATML))


SPACED = '<tool_call>{"name":"clock",\n"arguments":{"a":[1.50,  -0],"b" :"\\u00e9\\/"}}</tool_call>'
TWICE = '<tool_call>{"name": "clock", "arguments": {"a": 1, "a": 2}}</tool_call>'


def test_pieces_have_the_spaces_and_letters_of_the_call(ours):
    pieces = pieces_of(ours, SPACED)
    assert joined(pieces) == calls_in(pieces)
    assert calls_in(pieces)[0].arguments == '{"a": [1.5, 0], "b": "é/"}'
    pieces = pieces_of(ours, TWICE)
    assert joined(pieces) == calls_in(pieces)
    assert json.loads(calls_in(pieces)[0].arguments) == {"a": 2}


def test_arguments_may_be_called_parameters(ours):
    """As Llama 3 writes them."""
    pieces = pieces_of(ours, call_text("clock", '{"a": 1}').replace("arguments", "parameters"))
    assert joined(pieces) == calls_in(pieces)
    assert [call.arguments for call in calls_in(pieces)] == ['{"a": 1}']


CALL = call_text("get_weather", ARGUMENTS)
BROKEN = {
    "cut off": CALL[:-22],
    "no JSON": CALL.replace("3", "three"),
    "another end": CALL.replace("}}", "}]"),
    "arguments twice": CALL.replace("}}", '}, "name": "clock"}'),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_call_that_fails_is_text_though_some_of_it_was_sent(ours, text):
    pieces = pieces_of(ours, text)
    assert not calls_in(pieces)
    assert "".join(p.text for p in pieces if isinstance(p, AnswerText)) == text
    assert ARGUMENTS.startswith(joined(pieces)[0].arguments)


def test_no_call_that_nests_too_deep_is_sent_whole(ours):
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    pieces = pieces_of(ours, call_text("clock", f'{{"a": {deep}}}'))
    assert not calls_in(pieces)
    assert joined(pieces)[0].arguments == '{"a": ' + "[" * (MAX_DEPTH - 1)


@pytest.mark.parametrize(
    "text",
    [
        call_text("other", "{}"),
        call_text("clock", '"{}"'),
        '<tool_call>{"arguments": {}, "name": "clock"}</tool_call>',
    ],
)
def test_nothing_is_sent_of_what_may_be_no_call(ours, text):
    assert joined(pieces_of(ours, text)) == []


def test_several_calls_between_two_delimiters(tmp_path):
    text = CALLS["kimi_k2"]
    second = "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = text.replace("<|tool_calls_section_end|>", second + "<|tool_calls_section_end|>")
    markup = Markup.of(make(tmp_path, special=special(text), parser="kimi_k2"))
    pieces = pieces_of(markup, text)
    assert joined(pieces) == calls_in(pieces)
    assert [call.id for call in calls_in(pieces)] == [
        "functions.get_weather:0",
        "functions.clock:1",
    ]
    assert len(joined(pieces_of(markup, text, parallel=False))) == 1


KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = (
    '<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{{"a": {}}}<|tool_call_end|>'
)


@pytest.mark.parametrize("n_sections", [1, 2])
def test_calls_of_kimi_with_one_number_get_several(tmp_path, n_sections):
    """Its template takes the name from the id."""
    one, other = KIMI_CALL.format("clock:0", 1), KIMI_CALL.format("clock:0", 2)
    third = KIMI_CALL.format("clock:1", 3)
    between = "" if n_sections == 1 else KIMI.partition("{}")[2] + KIMI.partition("{}")[0]
    text = KIMI.format(between.join([one, other, third]))
    markup = Markup.of(make(tmp_path, special=special(text), parser="kimi_k2"))
    pieces = pieces_of(markup, text)
    assert joined(pieces) == calls_in(pieces)
    assert [(call.id, call.arguments) for call in calls_in(pieces)] == [
        ("functions.clock:0", '{"a": 1}'),
        ("functions.clock:1", '{"a": 2}'),
        ("functions.clock:2", '{"a": 3}'),
    ]


@pytest.mark.parametrize("between", [", ", "]</tool_call><tool_call>["])
def test_calls_with_one_id_get_several(ours, between):
    call = '{"id": "x", "name": "clock", "arguments": {}}'
    calls = calls_in(pieces_of(ours, f"<tool_call>[{call}{between}{call}]</tool_call>"))
    assert len({each.id for each in calls}) == len(calls) == 2
    assert calls[0].id == "x"


def test_a_call_that_is_begun_has_its_id_though_it_fails(tmp_path):
    """Clients have seen it."""
    broken = KIMI.format(KIMI_CALL.format("clock:0", "1, 2"))
    text = broken + KIMI.format(KIMI_CALL.format("clock:0", 1))
    markup = Markup.of(make(tmp_path, special=special(text), parser="kimi_k2"))
    (call,) = calls_in(pieces_of(markup, text))
    assert call.id == "functions.clock:1"
