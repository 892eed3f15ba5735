"""Tokens to pieces: text, reasoning, calls, and where the answer ends."""

import json
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepwarm.text.parsing import NORMAL, REASONING, AnswerReader, AnswerText, Markup, ReasoningText
from keepwarm.text.partial_calls import CallPiece
from keepwarm.text.request import ToolCall
from keepwarm.text.template import opens_thinking
from keepwarm.text.tools import CallReader, call_text
from tests.kit.tokenizers import make
from tests.text.formats import (
    ARGUMENTS,
    CALLS,
    CLOCK,
    HARMONY_CALL,
    HARMONY_TOKENS,
    LINES,
    WEATHER,
)

REPEATABLE = settings(deadline=None, derandomize=True, database=None, max_examples=40)
DELIMITERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CALL = CALLS["json_tools"]


@pytest.fixture(scope="module")
def markup(tmp_path_factory) -> Markup:
    """A model that thinks, and calls tools with JSON in tags, on lines of their own."""
    directory = tmp_path_factory.mktemp("t")
    return Markup.of(make(directory, template=LINES, tokens=DELIMITERS, parser="json_tools"))


def reader_of(
    markup, *, tools=(WEATHER, CLOCK), parallel=True, is_bound=False, **options
) -> AnswerReader:
    choice = {"parallel": parallel, "is_bound": is_bound}
    calls = CallReader(markup.tool_format, tools, **choice) if tools else None
    return AnswerReader(markup, calls=calls, **options)


def feed(reader, markup, text, ended=False):
    tokens = markup.tokenizer.encode(text, add_special_tokens=False)
    tokens += [markup.tokenizer.eos_token_id] * ended
    return [piece for token in tokens for piece in reader.add(token)]


def read(markup, text, *, ended=False, **options):
    """All pieces of an answer; consecutive pieces of one type are joined."""
    reader = reader_of(markup, **options)
    return joined([*feed(reader, markup, text, ended), *reader.finish()])


def joined(pieces):
    together = []
    for piece in (each for each in pieces if not isinstance(each, CallPiece)):
        if together and type(piece) is type(together[-1]) and not isinstance(piece, ToolCall):
            together[-1] = type(piece)(together[-1].text + piece.text)
        else:
            together.append(piece)
    return [(p.name, p.arguments) if isinstance(p, ToolCall) else p for p in together]


WEATHER_CALL = ("get_weather", ARGUMENTS)


@REPEATABLE
@given(tokens=st.lists(st.integers(0, 330), max_size=40), stop=st.sampled_from([(), ("zz",)]))
def test_without_delimiters_the_text_is_what_the_tokenizer_decodes(markup, tokens, stop):
    tokens = [t for t in tokens if t not in (2, *range(320, 324))]  # no stop token, no delimiters
    reader = reader_of(markup, stop=stop)
    pieces = [piece for token in tokens for piece in reader.add(token)] + reader.finish()
    whole = markup.tokenizer.decode(tokens, skip_special_tokens=True)
    if reader.stopped is None:
        assert "".join(piece.text for piece in pieces) == whole
    else:
        assert "".join(piece.text for piece in pieces) == whole[: whole.index("zz")]


WORDS = [
    *(*DELIMITERS, CALL, "STOP", "ST", "OP", " ", "\n"),
    *("the fox", "🦊", "<", "<tool", '{"name": 1}'),
]


@REPEATABLE
@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
@example(words=["<tool_call>", "<tool_call>", CALL, "</tool_call>"])
def test_pieces_do_not_depend_on_how_the_text_was_cut_into_tokens(markup, words):
    """A delimiter may be one token or many."""
    text = "".join(words)
    letters = [t for char in text for t in markup.tokenizer.encode(char, add_special_tokens=False)]
    options = {"stop": ("STOP", "fox the")}
    reader = reader_of(markup, **options)
    pieces = [piece for token in letters for piece in reader.add(token)] + reader.finish()
    assert joined(pieces) == read(markup, text, **options)


@REPEATABLE
@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
def test_no_text_is_lost(markup, words):
    """Pieces, delimiters and complete calls add up to the generated text, except for whitespace
    around calls."""
    text = "".join(words)
    shown = "".join(
        CALL
        if isinstance(piece, tuple) and not isinstance(piece, AnswerText | ReasoningText)
        else piece.text
        for piece in read(markup, text)
    )
    for delimiter in ("<think>", "</think>"):
        text, shown = text.replace(delimiter, ""), shown.replace(delimiter, "")
    assert "".join(shown.split()) == "".join(text.split())


def test_reasoning_that_the_prompt_opens(markup):
    opens = partial(opens_thinking, markup.tokenizer)
    assert opens("<|im_start|>assistant\n<think>\n")
    assert not opens("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens("<|im_start|>assistant\n")
    assert not opens("")
    assert markup.first_segment == NORMAL


@pytest.mark.parametrize(
    ("text", "segment", "pieces"),
    [
        (
            "<think>\nHm.\n</think>\n\nA fox.",
            NORMAL,
            [ReasoningText("\nHm.\n"), AnswerText("\n\nA fox.")],
        ),
        ("Hm.</think>A fox.", REASONING, [ReasoningText("Hm."), AnswerText("A fox.")]),
        ("<think>Hm, the <", NORMAL, [ReasoningText("Hm, the <")]),
        ("Hm </thi", REASONING, [ReasoningText("Hm </thi")]),
    ],
)
def test_reasoning_is_told_from_the_answer(markup, text, segment, pieces):
    assert read(markup, text, segment=segment) == pieces


def test_reasoning_tokens_are_counted(markup):
    reader = reader_of(markup)
    feed(reader, markup, "<think>")
    assert reader.n_reasoning == 0
    n_thoughts = len(markup.tokenizer.encode("the dog", add_special_tokens=False))
    feed(reader, markup, "the dog</think>the fox")
    assert reader.n_reasoning == n_thoughts + 1


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("one two three", (" two",), "one", " two"),
        ("one two three", ("x",), "one two three", None),
        ("abcd", ("abcd", "bc"), "a", "bc"),
        ("abcd", ("bcd", "abcd", "d"), "", "abcd"),
        ("one\n\nHuman: two", ("\n\nHuman:",), "one", "\n\nHuman:"),
        ("\n\nstop", ("stop",), "\n\n", "stop"),
        ("one 🦊 two", ("🦊",), "one ", "🦊"),
        ("aab", ("ab",), "a", "ab"),
        ("<tool_call>stop", ("stop",), "<tool_call>", "stop"),
        ("nothing", ("",), "nothing", None),
    ],
)
def test_the_answer_ends_before_a_stop_string(markup, text, stop, shown, stopped):
    reader = reader_of(markup, stop=stop)
    pieces = [*feed(reader, markup, text), *reader.finish()]
    assert "".join(piece.text for piece in pieces) == shown
    assert reader.stopped == stopped
    assert feed(reader, markup, "more") == reader.finish() == []


def test_text_that_may_become_a_stop_string_is_held_back(markup):
    reader = reader_of(markup, tools=(), stop=("dog!",))
    shown = feed(reader, markup, "the do")
    assert joined(shown) == [AnswerText("the ")]
    assert reader.stopped is None
    assert joined(feed(reader, markup, "g.")) == [AnswerText("dog.")]


def test_a_stop_string_ends_the_answer_only(markup):
    """It is not matched in reasoning or in the arguments of a call."""
    pieces = read(markup, f"<think>Oslo?</think>{CALL}", stop=("Oslo",))
    assert pieces == [ReasoningText("Oslo?"), WEATHER_CALL]


def test_stop_tokens_and_special_tokens_have_no_text(markup):
    assert read(markup, "the <|im_start|>fox", ended=True) == [AnswerText("the fox")]


def test_several_calls_with_text_before_and_after(markup):
    call = '<tool_call>{"name": "clock"}</tool_call>'
    pieces = read(markup, f"Let me see.\n{CALL}\n{call}\n")
    assert pieces == [AnswerText("Let me see."), WEATHER_CALL, ("clock", "{}")]
    assert read(markup, f"\n\n{CALL} So.") == [WEATHER_CALL, AnswerText(" So.")]


def test_text_before_a_call_is_without_what_the_template_writes_behind_it(markup):
    """Else the line break would be there twice in the next prompt."""
    for text in ("Hm.", "Hm.\n", "Hm.\n\n "):
        assert read(markup, f"{text}\n{CALL}") == [AnswerText(text), WEATHER_CALL]
    assert read(markup, f"Hm.{CALL}") == [AnswerText("Hm."), WEATHER_CALL]
    assert read(markup, f"<think>Hm.\n{CALL}") == [ReasoningText("Hm.\n"), WEATHER_CALL]


def test_without_parallel_calls_the_first_ends_the_answer(markup):
    reader = reader_of(markup, parallel=False)
    pieces = feed(reader, markup, f"{CALL}\n{CALL}")
    assert joined(pieces + reader.finish()) == [WEATHER_CALL]
    assert reader.done
    assert reader.stopped is None


def test_a_call_inside_reasoning_counts(markup):
    pieces = read(markup, f"<think>Hm.{CALL}So.</think>Yes.")
    assert pieces == [ReasoningText("Hm."), WEATHER_CALL, ReasoningText("So."), AnswerText("Yes.")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nothing of the kind</tool_call>",
        '<tool_call>{"name": "get_weather", "arguments": {</tool_call>',
        '<tool_call>{"name": "not_offered", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": "\\ud800"}}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" * 50 + "</tool_call>",
    ],
)
def test_a_malformed_call_comes_back_as_text(markup, text):
    assert read(markup, f"{text} So.") == [AnswerText(f"{text} So.")]
    assert read(markup, f"Hm.\n\n{text}\n") == [AnswerText(f"Hm.\n\n{text}\n")]
    assert read(markup, f"<think>{text}")[0] == ReasoningText(text)


def test_a_delimiter_in_the_text_does_not_hide_a_later_call(markup):
    pieces = read(markup, f"One writes <tool_call> so: {CALL}")
    assert pieces == [AnswerText("One writes <tool_call> so: "), WEATHER_CALL]


ENDS = [
    "Calls end with </tool_call>, always.",
    '"</tool_call></tool_call>\\',
    "\n</tool_call>\n<tool_call>",
]


@pytest.mark.parametrize("city", ENDS)
def test_the_end_of_a_call_may_be_quoted_in_its_arguments(markup, city):
    arguments = json.dumps({"city": city})
    call = call_text("get_weather", arguments)
    assert read(markup, f"{call} So.") == [("get_weather", arguments), AnswerText(" So.")]


@pytest.mark.parametrize("behind", ["\n", "\\", "\x00"])
def test_a_call_with_a_string_that_is_not_closed_ends(markup, behind):
    broken = f'<tool_call>{{"name": "clock", "arguments": {{"a": "b{behind}</tool_call>'
    reader = reader_of(markup)
    assert joined(feed(reader, markup, f"{broken} So.")) == [AnswerText(f"{broken} So.")]
    assert read(markup, f"{broken}\n{CALL}") == [AnswerText(broken), WEATHER_CALL]
    unclosed = broken.replace(behind, "")
    assert read(markup, f"{unclosed}\n{CALL}") == [AnswerText(unclosed), WEATHER_CALL]


def test_a_call_cut_off_by_length_is_text(markup):
    cut = CALL.removesuffix("</tool_call>")
    assert read(markup, cut) == [AnswerText(cut)]
    assert read(markup, cut[:20]) == [AnswerText(cut[:20])]


@pytest.mark.parametrize("n_letters", [3, 20, len(CALL) - 1])
def test_a_forced_call_cut_off_by_length_is_no_text(markup, n_letters):
    """Wherever: in its delimiters too. What was reasoned stays."""
    cut = f"<think>Hm.</think>\n{CALL[:n_letters]}"
    assert read(markup, cut, is_bound=True) == [ReasoningText("Hm.")]
    whole = f"<think>Hm.</think>{CALL}"
    assert read(markup, whole, is_bound=True) == [ReasoningText("Hm."), WEATHER_CALL]


@pytest.mark.parametrize("said", ['{"say": "<tool_call>', '{"say": "<tool_c', " \n{"])
def test_behind_text_nothing_is_taken_for_a_call_that_is_cut_off(markup, said):
    """As in an answer that has a format, and may be calls instead."""
    assert read(markup, said, is_bound=True) == [AnswerText(said)]


def test_a_call_that_a_stop_token_ends_counts(markup):
    assert read(markup, CALL.removesuffix("</tool_call>"), ended=True) == [WEATHER_CALL]


def test_without_tools_a_call_is_text(markup):
    assert read(markup, f"\n{CALL}", tools=()) == [AnswerText(f"\n{CALL}")]


def test_the_channels_of_gpt_oss(tmp_path):
    special = [f"<|{name}|>" for name in HARMONY_TOKENS]
    markup = Markup.of(make(tmp_path, special=special))
    opening = markup.first_segment
    pieces = read(markup, HARMONY_CALL, segment=opening, ended=True)
    assert pieces == [ReasoningText("They ask for Oslo."), WEATHER_CALL]
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    text += "<|channel|>final<|message|>A fox."
    assert read(markup, text, segment=opening) == [ReasoningText("Hm."), AnswerText("A fox.")]
    assert read(markup, text, segment=opening, tools=()) == [
        ReasoningText("Hm."),
        AnswerText("A fox."),
    ]


def test_the_delimiters_of_kimi_k3_are_not_text(tmp_path):
    special = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
    markup = Markup.of(make(tmp_path, special=special))
    text = "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>A fox."
    assert read(markup, text) == [ReasoningText("Hm."), AnswerText("A fox.")]
