"""Scrubbing rules remove the lines they name, and nothing else."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepwarm.errors import BadInput
from keepwarm.text import volatile as scrub
from keepwarm.text.request import Breakpoint, Request
from keepwarm.text.volatile import LINES, select_rules

DEFAULTS = select_rules()
BY_NAME = {rule.name: rule for rule in LINES}
BILLING = "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch={};"
COUNTER = "<total_tokens>{} tokens left</total_tokens>"

every_rule = pytest.mark.parametrize("rule", LINES, ids=lambda rule: rule.name)


def system(*texts):
    return {"role": "system", "content": [part(text) for text in texts]}


def part(text):
    return {"type": "text", "text": text}


def reminder(text):
    return f"<system-reminder>\n{text}\n</system-reminder>"


USER = {"role": "user", "content": "Hello"}


# What goes.


def test_a_billing_block_goes_whatever_it_says():
    one, two = (
        scrub.scrub_messages([system(BILLING.format(v), "Rules"), USER], DEFAULTS) for v in "ab"
    )
    assert one.messages == two.messages == [system("Rules"), USER]
    assert one.names == ("billing-header",)


def test_a_first_line_goes_and_the_rest_stays():
    text = f"{BILLING.format(1)}\n\n  You are kind.\n"
    left = scrub.scrub_messages([{"role": "system", "content": text}, USER], DEFAULTS)
    assert left.messages[0]["content"] == "\n  You are kind.\n"


def test_a_message_that_is_only_a_counter_goes():
    late = {"role": "system", "content": COUNTER.format(5)}
    left = scrub.scrub_messages([system("Rules"), USER, late], DEFAULTS)
    assert left.messages == [system("Rules"), USER]
    assert left.new_index == (0, 1, 1)
    assert left.names == ("total-tokens",)


def test_a_counter_behind_a_system_text_goes():
    text = f"# Environment\nLinux\n{COUNTER.format('Infinite')}"
    (left, _), *_ = scrub.scrub_messages([{"role": "system", "content": text}, USER], DEFAULTS)
    assert left["content"] == "# Environment\nLinux"


@pytest.mark.parametrize("name", ["total-tokens", "token-usage", "budget", "output-tokens"])
def test_a_reminder_that_is_only_a_counter_goes(name):
    said = {"role": "user", "content": [part("Go on"), part(reminder(BY_NAME[name].example))]}
    left = scrub.scrub_messages([said], DEFAULTS)
    assert left.messages == [{"role": "user", "content": [part("Go on")]}]
    assert left.names == (name,)


def test_a_date_goes_only_when_asked():
    context = reminder("# claudeMd\nBe brief.\n# currentDate\nToday's date is 2026-01-31.\n\nEnd.")
    said = {"role": "user", "content": [part(context), part("Hello")]}
    assert scrub.scrub_messages([said], DEFAULTS).messages == [said]
    left = scrub.scrub_messages([said], select_rules("date"))
    wanted = reminder("# claudeMd\nBe brief.\n# currentDate\n\nEnd.")
    assert left.messages[0]["content"] == [part(wanted), part("Hello")]
    assert left.names == ("date",)


@pytest.mark.parametrize(
    "line",
    [
        "  Today's date: Sun Jan 31 2026",
        "  <current_date>2026-01-31</current_date>",
        "Today's date is 2026-01-31.",
    ],
)
def test_dates_of_other_clients(line):
    left = scrub.scrub_messages([system(f"<env>\n{line}\n</env>"), USER], select_rules("date"))
    assert left.messages[0] == system("<env>\n</env>")


# What stays.


@every_rule
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_nothing_is_taken_from_what_people_tools_and_models_said(rule, role):
    texts = [rule.example, f"Look:\n{rule.example}\nWhat is it?"]
    messages = [{"role": role, "content": text} for text in texts]
    messages.append({"role": role, "content": [part(text) for text in texts]})
    assert scrub.scrub_messages(messages, select_rules("all")).messages == messages


@every_rule
def test_no_reminder_inside_of_other_text_is_touched(rule):
    inside = reminder(rule.example)
    pasted = [f"Why did I get this?\n{inside}", f"{inside}\nWhy?", f"a\n{inside}\nb"]
    messages = [{"role": role, "content": t} for t in pasted for role in ("user", "tool")]
    messages.append({"role": "tool", "content": inside})
    messages.append({"role": "assistant", "content": inside})
    assert scrub.scrub_messages(messages, select_rules("all")).messages == messages


@every_rule
def test_what_stands_between_two_reminders_is_no_reminder(rule):
    text = f"{reminder('Be brief.')}\n{rule.example}\n{reminder('Be kind.')}"
    message = {"role": "user", "content": [part(text)]}
    assert scrub.scrub_messages([message], select_rules("all")).messages == [message]


@every_rule
@pytest.mark.parametrize("shape", [" {}", "{} ", "{} more", "Say: {}", "`{}`"])
def test_a_line_of_almost_that_shape_stays(rule, shape):
    if rule.name == "date" and shape == " {}":
        shape = "-{}"  # dates may stand indented
    almost = system(shape.format(rule.example), "Rules")
    assert scrub.scrub_messages([almost, USER], select_rules("all")).messages == [almost, USER]


def test_counters_in_the_middle_of_a_system_text_stay():
    text = f"An example:\n{COUNTER.format(5)}\n{BILLING.format(5)}\nis what you may see."
    message = {"role": "system", "content": text}
    assert scrub.scrub_messages([message, USER], DEFAULTS).messages == [message, USER]


def test_a_prompt_never_goes_whole():
    alone = [{"role": "system", "content": COUNTER.format(5)}]
    assert scrub.scrub_messages(alone, DEFAULTS) == (alone, (), (0,))


SOME_LINES = st.lists(
    st.one_of(st.text(max_size=30), st.sampled_from([rule.example for rule in LINES])), max_size=4
)
TEXTS = st.one_of(
    SOME_LINES.map("\n".join),
    SOME_LINES.map("\n".join).map(reminder),
    st.just("<system-reminder>\n"),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
            "content": st.one_of(TEXTS, st.lists(TEXTS.map(part), max_size=3), st.none()),
        }
    ),
    max_size=5,
)


@given(MESSAGES)
@example([{"role": "system", "content": "\n".join(rule.example for rule in LINES)}, USER])
def test_only_lines_of_exact_shape_ever_go(messages):
    """What is missing afterwards are whole lines that a rule describes, and blocks left empty."""
    left = scrub.scrub_messages(messages, select_rules("all"))
    before = -1
    for message, index in zip(messages, left.new_index, strict=True):
        kept = left.messages[index] if index > before else None
        before = index
        if message["role"] in ("assistant", "tool"):
            assert kept is message
        gone = missing(lines_of(message), lines_of(kept) if kept else [])
        assert [line for line in gone if not may_go(line)] == []
        if not any(fits(line) for line in gone):
            assert kept is message


def missing(lines, kept):
    """The lines that are not kept; the kept ones must stand in their old order."""
    rest = iter(kept)
    wanted = next(rest, None)
    gone = []
    for line in lines:
        if line == wanted:
            wanted = next(rest, None)
        else:
            gone.append(line)
    assert wanted is None
    return gone


def fits(line):
    return any(rule.pattern.fullmatch(line) for rule in LINES)


def may_go(line):
    return fits(line) or not line.strip() or line in ("<system-reminder>", "</system-reminder>")


def lines_of(message):
    content = message["content"]
    texts = [content] if isinstance(content, str) else [p["text"] for p in content or []]
    return [line for text in texts for line in text.split("\n")]


# Through every API.


@pytest.mark.parametrize(
    ("path", "kind"),
    [("chat/completions", "text"), ("messages", "text"), ("responses", "input_text")],
)
def test_part_of_a_message_is_scrubbed_as_a_block_of_its_own(live, path, kind):
    """A line that would stand in the middle of the text, were the parts joined; the other way
    round, parts that would make a reminder together are none."""

    def said(*parts):
        return {"role": "system", "content": [{"type": kind, "text": text} for text in parts]}

    broken = ["<system-reminder>", COUNTER.format(5), "</system-reminder>"]
    asked = {"role": "user", "content": [{"type": kind, "text": text} for text in broken]}
    turns = [said("Rules", BILLING.format(1), "More"), asked]
    name = "input" if path == "responses" else "messages"
    answer = live.post(f"/v1/{path}", {"model": "m", name: turns, "max_tokens": 2})
    assert answer.json()["keepwarm"]["scrubbed"] == ["billing-header"]


# Marks, switches, the page.


def test_marks_go_with_what_they_stand_on():
    late = {"role": "system", "content": COUNTER.format(5)}
    first = {"role": "system", "content": BILLING.format(1)}
    request = Request(
        messages=[first, USER, late, USER],
        breakpoints=[Breakpoint(-1), Breakpoint(0), Breakpoint(1), Breakpoint(2, 60.0)],
    )
    left = scrub.scrub_request(request, DEFAULTS)
    assert left.messages == [USER, USER]
    assert [each.message for each in left.breakpoints] == [-1, -1, 0, 0]
    assert left.breakpoints[3].ttl_s == 60.0
    assert left.scrubbed == ("billing-header", "total-tokens")


def test_a_raw_prompt_is_left_alone():
    request = Request(prompt=BILLING.format(1))
    assert scrub.scrub_request(request, DEFAULTS) is request


def test_switches():
    names = lambda *switches: {rule.name for rule in select_rules(*switches)}  # noqa: E731
    assert names() == names("default") == BY_NAME.keys() - {"date"}
    assert names("all") == BY_NAME.keys()
    assert names("none") == set()
    assert names("none, date") == {"date"}
    assert names("date, -budget") == BY_NAME.keys() - {"budget"}
    assert names("none", "budget") == {"budget"}
    assert select_rules("none", "date") == (BY_NAME["date"],)


def test_an_unknown_rule_is_refused():
    with pytest.raises(
        BadInput, match=r"'dates' is not a scrubbing rule; use billing-header, .*date"
    ):
        select_rules("dates")


def test_every_rule_matches_its_example():
    assert all(rule.pattern.fullmatch(rule.example) for rule in LINES)
