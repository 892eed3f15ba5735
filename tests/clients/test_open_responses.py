"""The cases of the Open Responses compliance suite, checked by the published types of its schema.

The suite itself, `bin/compliance-test.ts` of openresponses/openresponses, takes the address of a
server: `bun run test:compliance --base-url http://127.0.0.1:8181/v1 --api-key any --model any`.
"""

import json
from collections.abc import Iterator

import openresponses_types as types
import pytest

from keepwarm import config
from keepwarm.models.load import load
from tests.clients.coders.model import FILE, write_model
from tests.server.conftest import serve

PLACE = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
TOOL = {"type": "function", "name": "get_weather", "description": "Says it.", "parameters": PLACE}
IMAGE = "data:image/png;base64,iVBORw0KGgo="


def said(text, role="user"):
    return {"type": "message", "role": role, "content": text}


WEATHER = {"input": [said("How is the weather in Lisbon?")], "tools": [TOOL]}
LOOK = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": IMAGE}]
SAID_BEFORE = [said("I am Alice."), said("Hello, Alice!", "assistant")]
# By the suite's names.
CASES = {
    "basic-response": {"input": [said("Say hello in three words.")]},
    "streaming-response": {"input": [said("Count to five.")], "stream": True},
    "system-prompt": {"input": [said("Speak as a pirate.", "system"), said("Say hello.")]},
    "tool-calling": WEATHER,
    "tool-calling-streaming": WEATHER | {"stream": True},
    "multi-turn": {"input": [*SAID_BEFORE, said("Who am I?")]},
}
CALL_EVENTS = {
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
}


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A server whose model calls the tool when it is asked about the weather."""
    place = tmp_path_factory.mktemp("weather")
    checkpoint = write_model(place / "model", "get_weather", {"location": "Lisbon"})
    described = checkpoint / "tokenizer_config.json"
    described.write_text(described.read_text().replace(FILE, "weather"))
    settings = config.load({"KEEPWARM_HOME": str(place)})
    with serve(load(str(checkpoint), settings), settings) as live:
        yield live


def events_of(text: str) -> Iterator[dict]:
    """The events of a stream, each by its published type."""
    lines = (line.removeprefix("data: ") for line in text.splitlines())
    for event in (json.loads(line) for line in lines if line.startswith("{")):
        words = event["type"].replace(".", "_").split("_")
        published = "".join(map(str.title, words)) + "StreamingEvent"
        getattr(types, published).model_validate(event)
        yield event


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_the_suite(caller, name):
    body = CASES[name]
    answer = caller.post("/v1/responses", {"model": "any", **body})
    assert answer.status_code == 200, answer.text
    events = list(events_of(answer.text)) if "stream" in body else []
    response = events[-1]["response"] if events else answer.json()
    types.ResponseResource.model_validate(response)
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["function_call" if "tools" in body else "message"]
    assert response["status"] == "completed"
    if "tools" in body and events:
        assert {event["type"] for event in events} >= CALL_EVENTS
        shown = [e["item"]["type"] for e in events if e["type"].startswith("response.output_item")]
        assert shown == ["function_call", "function_call"]


def test_an_image_is_refused_by_name(caller):
    """The suite's case `image-input`: the models here read text."""
    body = {"input": [{"type": "message", "role": "user", "content": LOOK}]}
    answer = caller.post("/v1/responses", body)
    assert (answer.status_code, "reads text only" in answer.text) == (400, True)
