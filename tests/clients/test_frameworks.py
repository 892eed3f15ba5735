"""Programs that use the official SDKs and frameworks built on them.

The SDKs are here anyway; the frameworks are installed for `make soak` alone.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import anthropic
import ollama
import pytest
from pydantic import BaseModel

from keepwarm import config
from keepwarm.models.load import load
from tests.clients.conftest import Recorder, Watched
from tests.kit.npm import npm_install
from tests.kit.scripted import call, write_scripted
from tests.server.conftest import serve

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "clients"
FRAMEWORKS = (
    "anthropic==2.8.0",
    "openai==3.49.0",
    "openai-agents==0.24.0",
    "langchain==1.4.7",
    "langchain-openai==1.7.3",
    "langchain-anthropic==1.7.7",
    "llm==0.36",
    "pydantic-ai-slim[openai]==2.66.0",
)
# They need an older SDK of OpenAI. litellm imports mcp where there are tools.
OLDER = (
    "litellm==1.106.2",
    "mcp==2.3.0",
    "instructor==1.17.0",
    "llama-index-llms-openai-like==0.8.1",
)
OLLAMA_JS = "ollama@0.6.4"
AI_SDK = ("ai@7.0.169", "@ai-sdk/openai-compatible@3.0.90", "zod@4.6.7", "node@22.23.3")
AI_SDK_PROVIDERS = ("@ai-sdk/openai@4.0.115", "@ai-sdk/anthropic@4.0.102")
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
ASK = {"role": "user", "content": "How many leaves has the oak?"}
AGAIN = {"role": "user", "content": "And in winter?"}
CALL = {"count_leaves": {"tree": "oak"}}
RESULT = "The oak has four leaves."
SCHEMA = {
    "type": "object",
    "properties": {"tree": {"type": "string"}},
    "required": ["tree"],
    "additionalProperties": False,
}
FUNCTION = {"name": "count_leaves", "description": "Counts leaves.", "parameters": SCHEMA}


class Tree(BaseModel):
    deciduous: bool


@pytest.fixture
def talk(watch):
    """A server that watches a conversation whose question is asked nowhere else."""
    return watch(CALL)


@pytest.fixture
def watched(watching):
    """A server for one conversation."""
    with watching(CALL) as watched:
        yield watched


def count_leaves(tree: str) -> str:
    """Say how many leaves a tree has.

    Args:
        tree: Which tree.
    """
    return f"The {tree} has four leaves."


def claude(watched, make=anthropic.Anthropic):
    return make(base_url=watched.url, api_key="any", max_retries=0, timeout=300)


def check_growth(watched, n_turns):
    """Each request goes on from the one before, and only its new tokens were computed."""
    turns = watched.turns()
    assert len(turns) == n_turns
    assert any(m["role"] == "tool" and m["content"] == RESULT for m in messages(turns[1]))
    assert all(turn.is_warm for turn in turns[1:])


def messages(turn):
    return turn.asked.request.messages


# The SDKs: a call of a tool, its result, an answer; as their own helpers do it.


def asked_by(name):
    return {"role": "user", "content": f"This is {name}. {ASK['content']}"}


def test_chat_streams_with_a_tool(talk):
    tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    said = [asked_by("chat")]
    with talk.live.openai() as client:
        for _ in range(2):
            chat = client.chat.completions.stream(model="x", messages=said, tools=tools)
            with chat as stream:
                message = stream.get_final_completion().choices[0].message
            said.append(message.to_dict())
            for call in message.tool_calls or ():
                result = count_leaves(**call.function.parsed_arguments)
                said.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content
    check_growth(talk, 2)


def test_responses_stream_with_a_tool(talk):
    """Without the server's memory: all items are sent again, as Codex does."""
    tools = [{"type": "function", **FUNCTION, "strict": True}]
    items = [asked_by("responses")]
    with talk.live.openai() as client:
        for _ in range(2):
            asked = client.responses.stream(model="x", input=items, tools=tools, store=False)
            with asked as stream:
                response = stream.get_final_response()
            items += [item.to_dict() for item in response.output]
            for call in (item for item in response.output if item.type == "function_call"):
                output = count_leaves(**call.parsed_arguments)
                result = {"type": "function_call_output", "call_id": call.call_id}
                items.append({**result, "output": output})
    assert response.output_text
    check_growth(talk, 2)


def test_responses_remember(talk):
    """With it: each request names the answer before."""
    asked = {"model": "x", "tools": [{"type": "function", **FUNCTION}]}
    with talk.live.openai() as client:
        answer = client.responses.create(input=[asked_by("memory")], **asked)
        (call,) = answer.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        for item in (result, AGAIN):
            answer = client.responses.create(input=[item], previous_response_id=answer.id, **asked)
    assert answer.output_text
    check_growth(talk, 3)


def test_tool_runner_of_anthropic(talk):
    """It would leave the conversation to the server; told that this one keeps none, it goes on."""
    tools, messages = [anthropic.beta_tool(count_leaves)], [asked_by("Anthropic's runner")]
    with claude(talk) as client:
        runner = client.beta.messages.tool_runner(
            model="x", max_tokens=100, tools=tools, messages=messages
        )
        answer = runner.until_done()
    assert answer.content[0].text
    assert talk.refused == [("POST", "/v1/messages", 400)]
    check_growth(talk, 2)


def test_functions_are_tools_of_ollamas_client(talk):
    """The client describes the function, gets a call without an id, and sends its result back."""
    asked = {"model": "tiny", "tools": [count_leaves]}
    said = [asked_by("Ollama's client")]

    async def stream():
        parts = []
        async with ollama.AsyncClient(host=talk.url, verify=False) as client:
            async for part in await client.chat(messages=said, **asked, stream=True):
                parts.append(part)
        return parts

    with ollama.Client(host=talk.url, verify=False) as client:
        first = client.chat(messages=said, **asked).message
        (call,) = first.tool_calls
        assert {call.function.name: call.function.arguments} == CALL
        result = count_leaves(**call.function.arguments)
        said += [first, {"role": "tool", "tool_name": call.function.name, "content": result}]
        parts = asyncio.run(stream())
        text = "".join(part.message.content for part in parts)
        said += [{"role": "assistant", "content": text}, AGAIN]
        third = client.chat(messages=said, **asked)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert text
    assert third.message.content
    assert talk.refused == []
    check_growth(talk, 3)


def test_thread_of_anthropic_is_refused_by_name(talk):
    """A conversation of which only the last message comes is never answered as if it were all."""
    with claude(talk) as client, pytest.raises(anthropic.BadRequestError) as error:
        client.beta.messages.create(
            model="x",
            max_tokens=9,
            messages=[ASK],
            thread={"type": "continue", "previous_message_id": "msg_1"},
        )
    assert error.value.error_code == "thread_unsupported_request"
    assert "send all messages" in str(error.value)


def test_helpers_of_three_apis_parse_an_object_of_the_clients_class(talk):
    """Objects of a class of the client's own, from three APIs, asynchronously."""

    async def ask():
        async with talk.live.async_openai() as client:
            chat = await client.chat.completions.parse(
                model="x", messages=[ASK], response_format=Tree
            )
            response = await client.responses.parse(model="x", input=[ASK], text_format=Tree)
        async with claude(talk, anthropic.AsyncAnthropic) as client:
            message = await client.messages.parse(
                model="x", max_tokens=4000, messages=[ASK], output_format=Tree
            )
        return chat.choices[0].message.parsed, response.output_parsed, message.parsed_output

    assert [type(found) for found in asyncio.run(ask())] == [Tree, Tree, Tree]


# What others have built upon them, in an environment of its own.


@contextmanager
def environment(packages):
    """Where the programs of an environment with these packages lie."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        install = (f"{place}/bin/python", "-m", "pip", "install", "--quiet", *packages)
        subprocess.run(install, check=True, capture_output=True)
        yield Path(place, "bin")


@pytest.fixture(scope="module")
def frameworks():
    with environment(FRAMEWORKS) as programs:
        yield programs


@pytest.fixture(scope="module")
def older():
    with environment(OLDER) as programs:
        yield programs


def run(frameworks, url, *command, **environ):
    """Start a program as `keepwarm launch any` does; what it printed."""
    launch = (sys.executable, "-m", "keepwarm", "launch", "any", "--url", url, "--")
    environ = {"PATH": f"{frameworks}:{os.environ['PATH']}", "HOME": str(frameworks), **environ}
    return output_of((*launch, *command), environ)


def run_by_variable(watched, *command, **environ):
    """The JSON that a program printed which finds the server by Ollama's variable."""
    environ = {"PATH": os.environ["PATH"], "OLLAMA_HOST": watched.url, **environ}
    return json.loads(output_of(command, environ).splitlines()[-1])


def output_of(command, environ):
    ended = subprocess.run(
        [*map(str, command)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


TALKS = [  # environment, program, its argument
    ("frameworks", EXAMPLES / "openai_agents.py", "responses"),
    ("frameworks", EXAMPLES / "openai_agents.py", "chat"),
    ("frameworks", HERE / "talks.py", "pydantic_ai"),
    ("older", HERE / "talks.py", "litellm"),
    ("older", HERE / "talks.py", "llama_index"),
]


@pytest.mark.soak
@pytest.mark.parametrize(("where", "program", "name"), TALKS)
def test_framework_talks_with_a_tool(watched, request, where, program, name):
    programs = request.getfixturevalue(where)
    check_talk(watched, run(programs, watched.url, "python", program, name, **OFFLINE))


def check_talk(watched, said):
    """Two answers; a call of the tool and its result in between."""
    assert len(said.splitlines()) == 2
    assert watched.refused == []
    check_growth(watched, 3)


@pytest.mark.soak
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_langchain(watched, frameworks, api):
    said = run(frameworks, watched.url, "python", EXAMPLES / "langchain_models.py", api)
    lines = dict(line.split(": ", 1) for line in said.splitlines())
    assert lines["stream"].replace("|", "") == lines["invoke"]
    assert lines["object"].startswith("Tree(name=")
    assert lines["called"] == f"['{RESULT}']"
    assert lines["answer"]
    assert watched.refused == []


@pytest.mark.soak
def test_anthropic_tools(watched, frameworks):
    said = run(frameworks, watched.url, "python", EXAMPLES / "anthropic_tools.py")
    assert said.splitlines()[0].startswith("tool_use")
    check_growth(watched, 2)


@contextmanager
def installed_by_npm(packages, program):
    """The folder of the programs, and a copy of this one beside them."""
    if shutil.which("npm") is None:
        pytest.skip("needs `npm`")
    with tempfile.TemporaryDirectory() as place:
        yield npm_install(Path(place), packages), shutil.copy(HERE / program, place)


@pytest.mark.soak
def test_ai_sdk_talks_with_a_tool(watched):
    with installed_by_npm(AI_SDK, "ai_sdk.mjs") as (programs, program):
        check_talk(watched, run(programs, watched.url, "node", program))


# A format beside tools: the model calls first if it may, then writes the object.


@pytest.fixture
def formatted(tmp_path):
    """A server whose model calls the tool, and then writes an object of the client's class."""
    answers = [call("count_leaves", **CALL["count_leaves"]), '{"deciduous": true}']
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)})
    path = write_scripted(tmp_path / "model", answers, under_grammar=True)
    model = load(str(path), settings)
    seen = []
    with serve(model, settings, around=lambda app: app.add_middleware(Recorder, seen=seen)) as live:
        yield Watched(live, seen, [])


def check_object(formatted, said):
    """The tool was called, its result came back, and the object followed: two requests."""
    answers = [each for each in formatted.seen if each.method == "POST"]
    assert formatted.refused == []
    assert [RESULT in str(each.json) for each in answers] == [False, True]
    assert said.strip() in ("Tree(deciduous=True)", '{"deciduous":true}')


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", ["agents_by_chat", "agents_by_responses", "pydantic_ai", "langchain"]
)
def test_framework_gets_an_object_after_a_tool(formatted, frameworks, name):
    program = HERE / "formats.py"
    check_object(formatted, run(frameworks, formatted.url, "python", program, name))


@pytest.fixture(scope="module")
def providers():
    with installed_by_npm([*AI_SDK, *AI_SDK_PROVIDERS], "ai_sdk_format.mjs") as place:
        yield place


@pytest.mark.soak
@pytest.mark.parametrize("name", ["compatible", "chat", "responses", "anthropic"])
def test_ai_sdk_gets_an_object_after_a_tool(formatted, providers, name):
    programs, program = providers
    check_object(formatted, run(programs, formatted.url, "node", program, name))


@pytest.mark.soak
def test_instructor(watched, older):
    said = run(older, watched.url, "python", HERE / "talks.py", "instructor")
    assert [line.partition("=")[0] for line in said.splitlines()] == ["deciduous", "deciduous"]
    assert watched.refused == []


@pytest.mark.soak
def test_llm(watched, frameworks, tmp_path):
    """An answer, an object, a function as a tool, and the conversation goes on."""
    settings = {"model_id": "keepwarm", "model_name": "tiny", "api_base": f"{watched.url}/v1"}
    lines = [f"  {name}: {value}" for name, value in settings.items()]
    flags = ["  supports_tools: true", "  supports_schema: true"]
    (tmp_path / "extra-openai-models.yaml").write_text("\n".join(["-", *lines, *flags]))

    def llm(*arguments):
        return run(frameworks, watched.url, "llm", *arguments, LLM_USER_PATH=str(tmp_path))

    assert llm("-m", "keepwarm", "Hello").strip()
    assert llm("-m", "keepwarm", "--schema", "deciduous bool", "Is it?").startswith("{")
    function = "def count_leaves(tree: str) -> str:\n    return f'The {tree} has four leaves.'"
    assert llm("-m", "keepwarm", "--functions", function, ASK["content"]).strip()
    assert llm("-c", "--functions", function, AGAIN["content"]).strip()
    assert watched.refused == []
    check_growth(watched, 3)


@pytest.mark.soak
def test_litellm_by_ollamas_api(watched, older):
    python, program = older / "python", HERE / "litellm_ollama.py"
    said = run_by_variable(watched, python, program, HOME=str(older), **OFFLINE)
    assert {said["name"]: said["arguments"]} == CALL
    assert said["streamed"]
    assert json.loads(said["object"]).keys() <= {"deciduous"}
    assert said["text"]
    assert said["prompt_tokens"] > 0
    assert watched.refused == []


@pytest.mark.soak
def test_ollamas_client_in_javascript(watched):
    with installed_by_npm([OLLAMA_JS], "ollama_client.mjs") as (_, program):
        said = run_by_variable(watched, "node", program)
    assert {said["call"]["name"]: said["call"]["arguments"]} == CALL
    assert said["streamed"]
    assert said["third"]
    assert said["done"] is True
    assert said["object"]["deciduous"] in (True, False)
    assert said["listed"] == said["loaded"] == "tiny:latest"
    assert said["capabilities"] == ["completion", "tools"]
    assert said["other"] == "FROM tiny:latest"  # that answers any name
    assert watched.refused == []
    check_growth(watched, 3)
