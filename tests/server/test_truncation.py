"""`truncation: auto`: which turns of a conversation that exceeds the context stay."""

from dataclasses import replace
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from keepwarm import config
from keepwarm.server.models.truncation import STEPS, truncate
from keepwarm.server.responses.request import Item
from tests.server.conftest import serve

N_CONTEXT = 512


def said(role, text):
    return Item(type="message", role=role, content=text)


def called(number):
    call = {"call_id": f"c{number}", "type": "function_call", "name": "f", "arguments": "{}"}
    return [Item(**call), Item(type="function_call_output", call_id=f"c{number}", output="1234")]


def turn(number, size=10):
    return [said("user", "?" * size), *called(number), said("assistant", "!" * size)]


def flat(turns):
    return list(chain.from_iterable(turns))


def count(items):
    """A token a letter, and one for each item."""
    return sum(1 + len(item.content or item.output or "") for item in items)


def fit(items, n_context, max_tokens=None):
    return truncate(items, count, n_context, max_tokens)


# What is left.


def test_the_oldest_turns_go_and_what_is_told_stays():
    told = [said("developer", "rules"), said("system", "more")]
    turns = [turn(number) for number in range(20)]
    kept = fit([*told, *flat(turns)], 200, 20)
    assert kept[:2] == told
    assert kept[2:] == flat(turns[-(len(kept) - 2) // 4 :])
    assert count(kept) <= 180


def test_the_last_turn_stays_whatever_it_takes():
    items = [*turn(1), said("user", "x" * 500)]
    assert fit(items, 200) == items[-1:]
    alone = [said("user", "x" * 500)]
    assert fit(alone, 200) == alone


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(80, 300),
    st.one_of(st.none(), st.integers(1, 400)),
)
def test_no_call_is_parted_from_what_it_gave_back(sizes, n_context, max_tokens):
    items = flat(turn(number, size) for number, size in enumerate(sizes))
    kept = fit(items, n_context, max_tokens)
    assert kept == items[len(items) - len(kept) :]
    assert kept[0].role == "user"
    calls = [item.call_id for item in kept if item.type == "function_call"]
    results = [item.call_id for item in kept if item.type == "function_call_output"]
    assert calls == results
    room = min(max_tokens or n_context, n_context // STEPS)
    assert count(kept) + room <= n_context or len(kept) == 4


def test_turns_that_follow_begin_alike():
    """Else every turn would be a new prompt: each forgets as much as the one before, or a lot."""
    items, begins = [], []
    for number in range(60):
        items += turn(number)
        if count(items) >= 400:
            begins.append(len(items) - len(fit(items, 400)))
    assert len(begins) > 30
    assert len(set(begins)) < len(begins) / 3
    assert begins == sorted(begins)


# Through the server


def test_truncation_of_a_long_conversation_is_told_and_stays_the_same(served_model, tmp_path):
    """Also of one that is kept: what is left out is found anew for each answer."""
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)})
    with serve(replace(served_model, n_context=N_CONTEXT), settings) as live:

        def ask(given, **options):
            body = {"input": given, "max_output_tokens": 8, "truncation": "auto", **options}
            return live.post("/v1/responses", body).json()

        given = [message("developer", "Be brief."), *[message("user", "word " * 30)] * 12]
        answer = ask(given)
        n_dropped = answer["keepwarm"]["dropped_items"]
        assert answer["truncation"] == "auto"
        assert 0 < n_dropped < 12
        assert answer["usage"]["input_tokens"] + 8 <= N_CONTEXT
        more = [*given, message("assistant", "Well."), message("user", "Go on.")]
        following = ask(more)["keepwarm"]
        assert following["dropped_items"] == n_dropped
        assert following["recomputed"] < following["prompt_tokens"] / 4
        kept = ask("Go on.", previous_response_id=answer["id"])["keepwarm"]
        assert kept["dropped_items"] == n_dropped
        assert kept["reused"]
        assert "dropped_items" not in ask("Hello")["keepwarm"]
        assert ask("Hello", truncation=None)["truncation"] == "disabled"


def message(role, text):
    return {"type": "message", "role": role, "content": text}
