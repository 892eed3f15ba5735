"""Functions as tools: described by their signature, run in rounds, never in a loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

import keepwarm
from keepwarm.errors import BadInput, RepeatedToolCall
from keepwarm.session.session import MAX_ROUNDS, Session, Toolbox, schema_of
from keepwarm.text.request import ToolCall, ToolCalled
from tests.kit.engines import engine_on
from tests.kit.runs import FedCounter
from tests.kit.scripted import call, write_scripted


def weather(city: str, days: int = 1) -> dict[str, Any]:
    """Say how the weather will be.

    Only for cities.

    Args:
        city (str): whose weather,
            by its name
        days: how many

    Returns:
        the sky
    """
    return {"city": city, "days": days, "sky": "grau, 5 °C"}


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

Start = Callable[..., AbstractContextManager[Session]]


@pytest.fixture
def session_with(tmp_path: Path) -> Start:
    """A session with these tools whose model gives these answers."""

    @contextmanager
    def start(answers: list[str], tools: list[Any], **options: Any) -> Iterator[Session]:
        model = keepwarm.load(str(write_scripted(tmp_path / "model", answers)))
        counted = replace(model, module=FedCounter(model.module))
        with engine_on(counted, tmp_path / "home") as engine:
            yield Session(engine, system="Use the tools.", tools=tools, **options)

    return start


# Rounds.


def test_a_function_is_run_and_the_model_goes_on(session_with):
    """Every round prefills only new tokens."""
    answers = [call("weather", city="Oslo"), call("weather", city="Rome", days=3), "It rains."]
    with session_with(answers, [weather, LOOK]) as session:
        reply = session.respond("And the weather?")
        assert (reply.text, reply.reason, reply.pending) == ("It rains.", "stop", ())
        assert [made.call.name for made in reply.calls] == ["weather", "weather"]
        assert json.loads(reply.calls[1].result) == weather("Rome", 3)
        assert not any(made.failed for made in reply.calls)
        roles = [message["role"] for message in session.messages]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
        assert "grau, 5 °C" in session.messages[2]["content"]
        assert session.n_turns == 1
        usages = [result.usage for result in reply.rounds]
        for before, after in pairwise(usages):
            assert after.cached_tokens == before.prompt_tokens + before.completion_tokens
        assert reply.usage.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
        assert reply.receipt.cached_tokens == reply.usage.cached_tokens
        assert reply.receipt.recomputed == reply.usage.prompt_tokens - reply.usage.cached_tokens


def test_calls_are_seen_as_they_come(session_with):
    """Streams run tools too."""
    with session_with([call("weather", city="Oslo"), "It rains."], [weather]) as session:
        stream = session.stream("And the weather?")
        shown = list(stream)
        assert [event.call.name for event in shown if isinstance(event, ToolCalled)] == ["weather"]
        assert "".join(getattr(event, "text", "") for event in shown) == "It rains."
        assert len(stream.reply.calls) == 1


def test_the_same_call_again_ends_the_turn(session_with):
    """The same arguments in another order are the same call; the text so far is in
    the error, and the conversation is as before."""
    answers = [
        "I look. " + call("weather", city="Oslo", days=2),
        "Again. " + call("weather", days=2, city="Oslo"),
    ]
    with session_with(answers, [weather]) as session:
        with pytest.raises(RepeatedToolCall, match="twice in a row") as raised:
            session.respond("And the weather?")
        assert raised.value.text == "I look. Again. "
        assert (session.messages, session.n_turns) == ([], 0)
        with pytest.raises(RepeatedToolCall):
            asyncio.run(session.arespond("And the weather?"))


def test_the_same_call_again_may_end_the_turn_with_its_text(session_with):
    """The repeated call is not run; it is left to the caller, who goes on with its result."""
    answers = [
        "I look. " + call("weather", city="Oslo"),
        "Again. " + call("weather", city="Oslo"),
        "It rains.",
    ]
    with session_with(answers, [weather], repeated_calls="return") as session:
        reply = session.respond("And the weather?")
        assert (reply.text, reply.reason) == ("I look. Again. ", "tool_calls")
        assert len(reply.calls) == 1
        (waiting,) = reply.pending
        assert reply.receipt.repeated_calls == (waiting.id,)
        assert session.n_turns == 1
        assert session.respond({waiting.id: "rain"}).text == "It rains."
        assert session.fork()._repeated_calls == "return"


def test_rounds_are_bounded(session_with):
    """Calls after the last round are left to the caller."""
    answers = [call("weather", city=f"City {number}") for number in range(MAX_ROUNDS + 1)]
    with session_with([*answers, "Enough."], [weather]) as session:
        reply = session.respond("And the weather?")
        assert len(reply.calls) == MAX_ROUNDS == 8
        assert reply.reason == "tool_calls"
        (waiting,) = reply.pending
        assert json.loads(waiting.arguments) == {"city": f"City {MAX_ROUNDS}"}
        assert session.respond({waiting.id: "sun"}).text == "Enough."
        assert session.n_turns == 2


def test_a_plain_schema_is_for_the_caller_to_run(session_with):
    """The caller loops over such calls."""
    with session_with([call("look", word="fox"), call("look", word="fox"), "A fox."], [LOOK]) as s:
        first = s.respond("What is a fox?")
        assert (first.text, first.calls, first.reason) == ("", (), "tool_calls")
        (waiting,) = first.pending
        assert (waiting.name, json.loads(waiting.arguments)) == ("look", {"word": "fox"})
        with pytest.raises(BadInput, match=waiting.id):
            s.respond("Well?")
        with pytest.raises(BadInput, match=f"{waiting.id}.*a summary would lose"):
            s.compact()
        with pytest.raises(BadInput, match="send one for each"):
            s.respond({"call_of_another": "an animal"})
        second = s.respond({waiting.id: "an animal"})
        assert second.usage.cached_tokens == sum(
            (first.usage.prompt_tokens, first.usage.completion_tokens)
        )
        assert s.respond({second.pending[0].id: "an animal"}).text == "A fox."
        fork = s.fork()
        assert fork.n_turns == s.n_turns == 3
        fork.rewind(2)
        assert len(fork.messages) == 4
        s.rewind(1)
        assert [message["role"] for message in s.messages] == ["user", "assistant"]


def test_functions_and_schemas_in_one_answer(session_with):
    both = call("look", word="fox") + "\n" + call("weather", city="Oslo")
    with session_with([both, "Well."], [LOOK, weather]) as session:
        reply = session.respond("Look.")
        assert [made.call.name for made in reply.calls] == ["weather"]
        assert [waiting.name for waiting in reply.pending] == ["look"]
        assert session.respond({reply.pending[0].id: "an animal"}).text == "Well."


def test_errors_in_a_tool_are_reported_to_the_model(session_with):
    def burn(wood: str) -> str:
        raise OSError(f"{wood} is wet")

    answers = [
        call("burn", wood="Oak"),
        call("weather", town="Oslo"),
        call("weather", city="Oslo", days="many"),
        "Too bad.",
    ]
    with session_with(answers, [burn, weather]) as session:
        reply = session.respond("Make a fire.")
        assert reply.text == "Too bad."
        assert all(made.failed for made in reply.calls)
        wet, unknown, wrong = (made.result for made in reply.calls)
        assert wet == "Error: OSError: Oak is wet"
        assert unknown.startswith("Error: ")
        assert "town: Unexpected keyword argument" in unknown
        assert "days: " in wrong
        assert "https:" not in unknown + wrong
        assert session.messages[2]["content"] == wet


def test_half_a_character_in_an_error_is_spelled_for_the_model():
    def burn() -> str:
        raise OSError("\udcff is wet")

    made = Toolbox([burn]).run(ToolCall("1", "burn", "{}"))
    assert made.result == "Error: OSError: \\udcff is wet"


def test_async_tools_run_on_the_loop(session_with):
    seen: list[object] = []

    async def fetch(page: str) -> str:
        await asyncio.sleep(0)
        seen.append(asyncio.get_running_loop())
        return page.upper()

    def plain(page: str) -> str:
        seen.append(threading.current_thread())
        return page

    answers = [call("fetch", page="a"), call("plain", page="b"), "Read."]
    with session_with(answers, [fetch, plain]) as session:

        async def talk() -> None:
            reply = await session.arespond("Read a.")
            assert [made.result for made in reply.calls] == ["A", "b"]
            assert seen[0] is asyncio.get_running_loop()
            assert seen[1] is not threading.current_thread()

        asyncio.run(talk())
        session.rewind(0)
        with pytest.raises(BadInput, match="arespond"):
            session.respond("Read a.")
        assert session.messages == []


def test_a_tool_that_asks_its_own_session_is_told_that_it_is_busy(session_with):
    held: list[Session] = []

    def ask(question: str) -> str:
        return held[0].respond(question).text

    with session_with([call("ask", question="Who?"), "Nobody."], [ask]) as session:
        held.append(session)
        alone = session.respond("Ask.")
        session.rewind(0)
        in_a_thread = asyncio.run(session.arespond("Ask."))
        for reply in (alone, in_a_thread):
            assert reply.text == "Nobody."
            assert reply.calls[0].result.startswith("Error: Busy")


def _within_itself() -> list[Any]:
    listed: list[Any] = []
    listed.append(listed)
    return listed


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({(0, 1): "grau"}, "TypeError"),
        (_within_itself(), "ValueError"),
        ("half \udcff", "UnicodeEncodeError"),
        ({"half": "\udcff"}, "UnicodeEncodeError"),
    ],
)
def test_a_result_that_is_no_json_is_an_error_for_the_model(session_with, made, why):
    def look() -> Any:
        return made

    async def alook() -> Any:
        return made

    for tool in (look, alook):
        with session_with([call(tool.__name__), "Nothing."], [tool]) as session:
            reply = asyncio.run(session.arespond("And?"))
            assert reply.text == "Nothing."
            assert reply.calls[0].failed
            assert reply.calls[0].result.startswith(f"Error: {why}")
    made_here = Toolbox([look]).run(ToolCall("1", "look", "{}"))
    assert made_here.failed


def test_a_function_that_returns_a_coroutine_is_awaited(session_with):
    async def find(city: str) -> str:
        return f"{city}: grau"

    def look(city: str) -> Any:
        return find(city)

    with session_with([call("look", city="Oslo"), "It rains."], [look]) as session:
        reply = asyncio.run(session.arespond("And the weather?"))
        assert reply.calls[0].result == "Oslo: grau"
        session.rewind(0)
        with pytest.raises(BadInput, match="'look' is async"):
            session.respond("And the weather?")


def test_a_fork_has_the_same_tools(session_with):
    with session_with([call("weather", city="Oslo"), "It rains."], [weather]) as session:
        assert session.fork().respond("And the weather?").calls[0].call.name == "weather"


# Schemas.


def test_a_schema_comes_from_signature_and_docstring():
    function = schema_of(weather)["function"]
    assert function["name"] == "weather"
    assert function["description"].startswith("Say how the weather will be.\n\nOnly for cities.")
    assert "how many" not in function["description"]
    assert function["parameters"] == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "city": {"type": "string", "description": "whose weather, by its name"},
            "days": {"type": "integer", "default": 1, "description": "how many"},
        },
        "required": ["city"],
    }


def test_types_become_schemas():
    def pick(
        kind: Literal["a", "b"],
        sizes: list[float],
        names: dict[str, bool] | None = None,
        note: Annotated[str, Field(description="said here")] = "",
    ) -> None: ...

    function = schema_of(pick)["function"]
    properties = function["parameters"]["properties"]
    assert "description" not in function
    assert properties["kind"]["enum"] == ["a", "b"]
    assert properties["sizes"] == {"type": "array", "items": {"type": "number"}}
    assert {"type": "null"} in properties["names"]["anyOf"]
    assert properties["note"]["description"] == "said here"
    assert function["parameters"]["required"] == ["kind", "sizes"]


def test_methods_are_tools_too():
    class Counter:
        n = 0

        def add(self, n: int) -> int:
            """Add to it."""
            self.n += n
            return self.n

    counter = Counter()
    made = Toolbox([counter.add]).run(ToolCall("1", "add", '{"n": 3}'))
    assert (made.result, counter.n) == ("3", 3)


class Unknown:
    pass


def _takes_unknown(thing: Unknown) -> None: ...


def _takes_nameless(*things: str) -> None: ...


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ([_takes_unknown], "cannot be described"),
        ([_takes_nameless], "give each a name"),
        ([weather, weather], "same name"),
        ([LOOK, {**LOOK}], "same name"),
        ([{"name": "look"}], "must be"),
    ],
)
def test_invalid_tools_are_refused_in_one_sentence(tools, why):
    with pytest.raises(BadInput, match=why) as refused:
        Toolbox(tools)
    assert "\n" not in str(refused.value)
