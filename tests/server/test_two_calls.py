"""Two tools called in one answer, by every API and its official client, whole and streamed."""

import json

import anthropic
import pytest

from keepwarm import config
from tests.kit.scripted import call, write_scripted
from tests.server.conftest import serve

PLACES = ("here", "there")
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FUNCTION = {"name": "weather", "description": "What it is like.", "parameters": SCHEMA}
USER = [{"role": "user", "content": "How is the weather here and there?"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Its model answers with two calls, and says something once their results are there."""
    from keepwarm.models.load import load

    home = tmp_path_factory.mktemp("calls")
    both = "\n".join(call("weather", place=place) for place in PLACES)
    settings = config.load({"KEEPWARM_HOME": str(home / "home")})
    path = write_scripted(home / "model", [both, "It rains."])
    with serve(load(str(path), settings), settings) as live:
        yield live


@pytest.fixture(scope="module")
def gpt(live):
    with live.openai() as client:
        yield client


@pytest.fixture(scope="module")
def claude(live):
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        yield client


def places(arguments):
    return tuple(json.loads(each)["place"] for each in arguments)


def chat_options(parallel):
    tools = [{"type": "function", "function": FUNCTION}]
    return {"model": "m", "messages": USER, "tools": tools, "parallel_tool_calls": parallel}


def chat_whole(gpt, parallel):
    choice = gpt.chat.completions.create(**chat_options(parallel)).choices[0]
    assert choice.finish_reason == "tool_calls"
    return choice.message


def chat_streamed(gpt, parallel):
    with gpt.chat.completions.stream(**chat_options(parallel)) as stream:
        stream.until_done()
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    return choice.message


@pytest.mark.parametrize("ask", [chat_whole, chat_streamed])
def test_chat(gpt, ask):
    message = ask(gpt, True)
    calls = message.tool_calls
    assert places(each.function.arguments for each in calls) == PLACES
    assert len({each.id for each in calls}) == 2
    results = [{"role": "tool", "tool_call_id": each.id, "content": "Rain."} for each in calls]
    talk = [*USER, message.model_dump(exclude_none=True, include={"role", "tool_calls"}), *results]
    after = gpt.chat.completions.create(**chat_options(True) | {"messages": talk})
    assert after.choices[0].message.content == "It rains."
    (only,) = ask(gpt, False).tool_calls
    assert places([only.function.arguments]) == PLACES[:1]


def response_options(parallel):
    tools = [{"type": "function", **FUNCTION}]
    return {"model": "m", "input": USER, "tools": tools, "parallel_tool_calls": parallel}


def response_whole(gpt, parallel):
    return gpt.responses.create(**response_options(parallel))


def response_streamed(gpt, parallel):
    return list(gpt.responses.create(**response_options(parallel), stream=True))[-1].response


@pytest.mark.parametrize("ask", [response_whole, response_streamed])
def test_responses(gpt, ask):
    answer = ask(gpt, True)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert places(each.arguments for each in calls) == PLACES
    results = [
        {"type": "function_call_output", "call_id": each.call_id, "output": "Rain."}
        for each in calls
    ]
    asked = response_options(True) | {"input": results, "previous_response_id": answer.id}
    assert gpt.responses.create(**asked).output_text == "It rains."
    (only,) = [item for item in ask(gpt, False).output if item.type == "function_call"]
    assert places([only.arguments]) == PLACES[:1]


def message_options(parallel):
    tools = [{"name": "weather", "description": "What it is like.", "input_schema": SCHEMA}]
    choice = {"type": "auto", "disable_parallel_tool_use": not parallel}
    usual = {"model": "m", "messages": USER, "max_tokens": 100}
    return usual | {"tools": tools, "tool_choice": choice}


def message_whole(claude, parallel):
    return claude.messages.create(**message_options(parallel))


def message_streamed(claude, parallel):
    with claude.messages.stream(**message_options(parallel)) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("ask", [message_whole, message_streamed])
def test_messages(claude, ask):
    answer = ask(claude, True)
    assert answer.stop_reason == "tool_use"
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert tuple(each.input["place"] for each in calls) == PLACES
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": "Rain."} for c in calls]
    said = {"role": "assistant", "content": [each.model_dump() for each in calls]}
    talk = [*USER, said, {"role": "user", "content": results}]
    after = claude.messages.create(**message_options(True) | {"messages": talk})
    assert after.content[0].text == "It rains."
    (only,) = [block for block in ask(claude, False).content if block.type == "tool_use"]
    assert only.input["place"] == PLACES[0]


def test_a_budget_for_thinking_is_taken_and_not_kept_to(claude):
    """As the manual says: what bounds an answer, thoughts included, is max_tokens."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = claude.messages.create(**message_options(True), thinking=thinking)
    assert answer.stop_reason == "tool_use"
