"""A prepared request: what it refuses, and the effect of tool_choice."""

import json
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace

import pytest
from tokenizers import AddedToken

import keepwarm
from keepwarm.errors import BadInput, ContextTooLong
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.text import grammar
from keepwarm.text.parsing import AnswerReader, AnswerText, ReasoningText
from keepwarm.text.prepare import MAX_AGENTS, LatestAnswers, Preparer
from keepwarm.text.request import Format, Request, Sampling, ToolChoice
from keepwarm.text.tools import call_text
from tests.kit.checkpoints import make_tokenizer, write_checkpoint
from tests.kit.tokenizers import WITH_TOOLS
from tests.text.formats import CALLS, HARMONY_TOKENS, WEATHER, special_tokens

AUTO = ToolChoice("auto")
TALK = [{"role": "user", "content": "Oslo?"}]
NONE = ToolChoice("none")
CHANNELS = [f"<|{name}|>" for name in HARMONY_TOKENS]
THOUGHT = "<|channel|>analysis<|message|>It is to= them.<|end|><|start|>assistant"


def model_with(directory, template=WITH_TOOLS, special=(), parser=None):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    path = write_checkpoint(directory, tokenizer=tokenizer, template=template)
    if parser:
        described = path / "tokenizer_config.json"
        config = json.loads(described.read_text()) | {"tool_parser_type": parser}
        described.write_text(json.dumps(config))
    return keepwarm.load(str(path))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model whose template has no tools: it gets the tool block, with plain-text delimiters."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return model_with(tmp_path_factory.mktemp("plain"), template)


@pytest.fixture(scope="module")
def channels(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("channels"), special=CHANNELS)


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    """One whose calls have their objects in a way of their own."""
    special = special_tokens(CALLS["gemma4"])
    return model_with(tmp_path_factory.mktemp("nested"), special=special, parser="gemma4")


def prepared_by(model, **wishes):
    wishes = {"messages": TALK, "tools": [WEATHER], "tool_choice": NONE, **wishes}
    return Preparer(model, model.config["vocab_size"], RecentPrompts()).prepare(Request(**wishes))


def may_say(model, text, letters=False, **wishes):
    """Whether this text is allowed, token by token; `letters` encodes it letter by letter."""
    matcher = prepared_by(model, **wishes).new_matcher()
    parts = list(text) if letters else [text]
    encode = model.tokenizer.encode
    for token in [t for part in parts for t in encode(part, add_special_tokens=False)]:
        if not matcher.mask()[token]:
            return False
        matcher.advance(token)
    return True


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"sampling": Sampling(top_p=2.0)}, "top_p is 2.0"),
        ({"n": 0}, "n is 0; it must be from 1 to 16"),
        ({"n": 17}, "n is 17"),
        (
            {"prompt": [320], "messages": None},
            "contains the token 320, and the model's tokens are 0 to 319",
        ),
        ({"prompt": [-1], "messages": None}, "contains the token -1"),
        ({"prompt": "", "messages": None}, "prompt is empty"),
    ],
)
def test_a_request_out_of_range_is_refused(plain, wishes, says):
    with pytest.raises(BadInput, match=says):
        prepared_by(plain, **{"tools": (), **wishes})


def test_a_request_at_its_limits_is_prepared(plain):
    """The last token of the vocabulary, as many choices as there may be, room for one token."""
    prompt = [319] * (plain.n_context - 1)
    prepared = prepared_by(plain, prompt=prompt, messages=None, n=16, tools=())
    assert (prepared.tokens, prepared.max_new_tokens) == (prompt, 1)
    with pytest.raises(ContextTooLong, match="reads at most 4,095"):
        prepared_by(plain, prompt=[*prompt, 0], messages=None, tools=())


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice(name="get_weather")])
def test_a_call_cannot_be_forced_where_there_are_no_tools(plain, choice):
    with pytest.raises(BadInput, match="no tools; send some") as refused:
        prepared_by(plain, tools=(), tool_choice=choice)
    assert "tool_choice" in str(refused.value)


@pytest.mark.parametrize("letters", [False, True])
def test_where_calls_begin_with_plain_text_that_text_is_not_said(plain, letters):
    assert may_say(plain, "It rains in Oslo <tool> \n 🦊 <tool_call", letters)
    assert not may_say(plain, "Hm. <tool_call>", letters)
    assert not may_say(plain, "<tool_<tool_call>", letters)


def test_calls_are_forbidden_in_channels_too(channels):
    assert may_say(channels, f"{THOUGHT}<|channel|>final<|message|>It rains.")
    assert not may_say(channels, f"{THOUGHT}<|channel|>commentary to=functions.get_weather")


def test_the_answer_may_end_anywhere(plain):
    matcher = prepared_by(plain).new_matcher()
    stop = plain.tokenizer.eos_token_id
    for token in plain.tokenizer.encode("It rains"):
        assert matcher.mask()[stop]
        matcher.advance(token)
    matcher.advance(stop)
    assert matcher.finished


def test_a_call_start_that_is_one_token_is_forbidden_as_such(tmp_path):
    model = model_with(tmp_path, special=["<tool_call>", "</tool_call>"])
    prepared = prepared_by(model)
    start = model.tokenizer.convert_tokens_to_ids("<tool_call>")
    assert prepared.sampling.logit_bias == {start: -100.0}
    assert prepared.new_matcher() is None


def test_a_format_holds_where_no_call_may_come(channels):
    wanted = Format(schema={"enum": [1, 2]})
    assert may_say(channels, "<|channel|>final<|message|>2", format=wanted)
    assert not may_say(channels, "<|channel|>final<|message|>3", format=wanted)


# A format beside tools


YES = Format(schema={"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"]})
ANSWER = '{"ok":1}'
CALL = call_text("get_weather", '{"city": "Oslo"}')


def test_a_grammar_is_the_whole_answer(plain):
    wanted = Format(grammar='start: "yes"')
    assert may_say(plain, "yes", format=wanted, tool_choice=AUTO)
    assert not may_say(plain, CALL, format=wanted, tool_choice=AUTO)


def test_a_format_or_a_call_after_reasoning_in_channels(channels):
    wishes = {"format": YES, "tool_choice": AUTO}
    call = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    for begin in ("", THOUGHT):
        assert may_say(channels, f"{begin}<|channel|>final<|message|>{ANSWER}", **wishes)
        assert may_say(channels, f'{begin}{call}{{"city": "Oslo"}}', **wishes)
        assert not may_say(channels, f'{begin}{call}{{"town": "Oslo"}}', **wishes)
        assert not may_say(channels, f"{begin}<|channel|>final<|message|>Hm.", **wishes)


@pytest.mark.parametrize("opened", [True, False])
def test_a_format_or_a_call_after_reasoning(tmp_path, opened):
    """Also where the prompt has opened it."""
    start = "{{ '<think>' }}" if opened else ""
    special = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    model = model_with(tmp_path, WITH_TOOLS + start, special)
    wishes = {"format": YES, "tool_choice": AUTO}
    thought = "Hm.</think>" if opened else "<think>Hm.</think>"
    assert may_say(model, thought + ANSWER, **wishes)
    assert may_say(model, f"{thought}\n\n{CALL}", **wishes)
    assert not may_say(model, f"{thought}Hm.", **wishes)


def pieces_of(model, text, **wishes):
    prepared = prepared_by(model, **wishes)
    reader = AnswerReader(prepared.markup, segment=prepared.first_segment)
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    return [piece for token in tokens for piece in reader.add(token)] + reader.finish()


def test_all_of_the_answer_to_a_raw_prompt_is_text(channels, tmp_path):
    """In its order: APIs for raw prompts have one field."""
    thinker = model_with(tmp_path, special=["<think>", "</think>"])
    raw = {"messages": None, "prompt": "2+2", "tools": ()}
    for model, text in ((thinker, "So: <think>Hm.</think>4"), (channels, f"So: {THOUGHT}4")):
        pieces = pieces_of(model, text, **raw)
        assert {type(piece) for piece in pieces} == {AnswerText}
        tokens = model.tokenizer.encode(text, add_special_tokens=False)
        shown = model.tokenizer.decode(tokens, skip_special_tokens=True)
        assert "".join(piece.text for piece in pieces) == shown
        assert any(isinstance(piece, ReasoningText) for piece in pieces_of(model, text))


def test_a_call_in_a_format_that_cannot_be_forced_is_free(tmp_path):
    """Beside a format: it is read as ever."""
    call = CALLS["function_gemma"]
    model = model_with(tmp_path, special=special_tokens(call), parser="function_gemma")
    assert may_say(model, call, format=YES, tool_choice=AUTO)
    assert not may_say(model, "Hm.", format=YES, tool_choice=AUTO)


# Strict tools


def test_a_strict_tool_binds_its_calls_and_is_offered_like_any_other(plain):
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    wishes = {"tools": [strict], "tool_choice": AUTO}
    assert may_say(plain, f"Let me see. {CALL}", **wishes)
    assert not may_say(plain, f"Let me see. {CALL.replace('city', 'town')}", **wishes)
    loose = prepared_by(plain, tool_choice=AUTO)
    assert loose.new_matcher() is None
    assert loose.tokens == prepared_by(plain, **wishes).tokens


BEYOND = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^(?!x).*$"}}}


@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_beyond_a_grammar_takes_the_binding_and_not_the_request(plain, strict):
    tool = {**WEATHER, "function": {"name": "f", "parameters": BEYOND, "strict": strict}}
    wishes = {"tools": [tool], "tool_choice": AUTO}
    assert prepared_by(plain, **wishes).new_matcher() is None
    assert may_say(plain, ANSWER, format=YES, **wishes)
    assert may_say(plain, call_text("f", '{"city": ["any"]}'), format=YES, **wishes)
    assert not may_say(plain, call_text("f", '{"town": 1}'), format=YES, **wishes)
    assert not may_say(plain, "Hm.", format=YES, **wishes)


def test_tools_beyond_a_grammar_whatever_their_arguments_leave_the_format(plain, monkeypatch):
    tool = {**WEATHER, "function": {"name": "f" * 400, "parameters": BEYOND}}
    wishes = {"tools": [tool], "tool_choice": AUTO, "format": YES}
    call = call_text("f" * 400, '{"city": 1}')
    assert may_say(plain, call, **wishes)
    monkeypatch.setattr(grammar, "MAX_CHARACTERS", 400)
    assert may_say(plain, ANSWER, **wishes)
    assert not may_say(plain, call, **wishes)


ODD = [
    {"properties": ["city"]},
    {"properties": "city"},
    {"properties": {"city": {}}, "required": True},
    {"properties": {"city": {}}, "required": "city"},
    {"properties": {"city": {}}, "required": [["city"], {}, None]},
    {"properties": {"city": {"type": "object", "properties": [1], "required": 1}}},
    {"properties": {"city": {"type": "string", "enum": 1}}},
    {"properties": {"city": {"anyOf": 1}}, "$defs": [1]},
    {"properties": {"city": {"type": ["object", 1, []], "items": 1}}, "definitions": 1},
]


@pytest.mark.parametrize("schema", ODD)
@pytest.mark.parametrize("template", ["plain", "channels", "nested"])
def test_an_odd_schema_is_ignored_or_refused_with_a_sentence(request, template, schema):
    model = request.getfixturevalue(template)
    tool = {**WEATHER, "function": {"name": "f", "parameters": schema, "strict": True}}
    wishes = {"tools": [tool], "tool_choice": AUTO}
    prepared_by(model, **wishes)
    assert prepared_by(model, format=YES, **wishes).new_matcher() is not None
    with suppress(BadInput):
        prepared_by(model, tools=[tool], tool_choice=ToolChoice("required"))
    with suppress(BadInput):
        prepared_by(model, format=Format(schema={"type": "object", **schema}))


def test_the_receipt_names_keywords_of_a_schema_that_are_ignored(plain):
    wanted = Format(schema={"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    prepared = prepared_by(plain, format=wanted, ignored_fields=("store",))
    assert prepared.request.ignored_fields == ("store", "schema.uniqueItems")
    with pytest.raises(BadInput, match="uniqueItems"):
        prepared_by(plain, format=replace(wanted, strict=True))


def test_tool_results_are_tokens_of_the_call_that_would_write_them_back(plain):
    talk = [*TALK, {"role": "tool", "content": '  1→say("Oslo")\n'}]
    preparer = Preparer(plain, plain.config["vocab_size"], RecentPrompts())
    prepared = preparer.prepare(Request(messages=talk, tools=[WEATHER]))
    (found,) = preparer.with_rewritten(prepared).rewritten
    assert plain.tokenizer.decode(list(found)) == 'say(\\"Oslo\\")\\n'
    larger, smaller = (Preparer(plain, max(found) + n, RecentPrompts()) for n in (1, 0))
    assert larger.with_rewritten(prepared).rewritten == [found]
    assert smaller.with_rewritten(prepared).rewritten == []
    without = preparer.prepare(Request(messages=talk))
    assert preparer.with_rewritten(without).rewritten == ()


def test_an_answer_is_remembered_while_all_are_forgotten(monkeypatch):
    """By another thread, between two steps."""

    class Emptied(OrderedDict):
        def __len__(self):
            self.clear()
            return MAX_AGENTS + 1

    answers = LatestAnswers()
    monkeypatch.setattr(answers, "_lines", Emptied())
    request = Request(prompt="hi", agent="ada")
    answers.remember(request, "a line that is long enough " * 9)
    assert not answers.are_quoted(request)
