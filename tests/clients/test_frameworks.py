"""Programs that use the official SDKs and frameworks built on them.

The SDKs are here anyway; the frameworks are installed for `make soak` alone.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import anthropic
import pytest
from pydantic import BaseModel

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "clients"
FRAMEWORKS = (
    "anthropic==2.8.0",
    "openai==3.49.0",
    "openai-agents==0.24.0",
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
AI_SDK = ("ai@7.0.169", "@ai-sdk/openai-compatible@3.0.90", "zod@4.6.7", "node@22.23.3")
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


@pytest.fixture(scope="module")
def busy(watching):
    """One server for all that do not look at each other's conversations."""
    with watching(CALL) as watched:
        yield watched


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


def test_chat_streams_with_a_tool(watched):
    tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    said = [ASK]
    with watched.live.openai() as client:
        for _ in range(2):
            chat = client.chat.completions.stream(model="x", messages=said, tools=tools)
            with chat as stream:
                message = stream.get_final_completion().choices[0].message
            said.append(message.to_dict())
            for call in message.tool_calls or ():
                result = count_leaves(**call.function.parsed_arguments)
                said.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content
    check_growth(watched, 2)


def test_responses_stream_with_a_tool(watched):
    """Without the server's memory: all items are sent again, as Codex does."""
    tools = [{"type": "function", **FUNCTION, "strict": True}]
    items = [ASK]
    with watched.live.openai() as client:
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
    check_growth(watched, 2)


@pytest.mark.soak
def test_responses_remember(watched):
    """With it: each request names the answer before."""
    tools = [{"type": "function", **FUNCTION}]

    async def talk():
        async with watched.live.async_openai() as client:
            first = await client.responses.create(model="x", input=[ASK], tools=tools)
            (call,) = first.output
            result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
            previous = first.id
            for item in (result, AGAIN):
                answer = await client.responses.create(
                    model="x", input=[item], tools=tools, previous_response_id=previous
                )
                previous = answer.id
            return answer

    assert asyncio.run(talk()).output_text
    check_growth(watched, 3)


def test_the_tool_runner_of_anthropic(watched):
    """It would leave the conversation to the server; told that this one keeps none, it goes on."""
    with claude(watched) as client:
        runner = client.beta.messages.tool_runner(
            model="x", max_tokens=100, tools=[anthropic.beta_tool(count_leaves)], messages=[ASK]
        )
        answer = runner.until_done()
    assert answer.content[0].text
    assert watched.refused == [("POST", "/v1/messages", 400)]
    check_growth(watched, 2)


@pytest.mark.soak
def test_the_tool_runner_of_anthropic_streams(watched):
    async def counts(tree: str) -> str:
        return count_leaves(tree)

    async def talk():
        tool = anthropic.beta_async_tool(
            counts, name="count_leaves", description="Counts.", input_schema=SCHEMA
        )
        async with claude(watched, anthropic.AsyncAnthropic) as client:
            runner = client.beta.messages.tool_runner(
                model="x", max_tokens=100, tools=[tool], messages=[ASK], stream=True
            )
            return [await stream.get_final_message() async for stream in runner]

    called, answered = asyncio.run(talk())
    assert called.stop_reason == "tool_use"
    assert answered.stop_reason == "end_turn"
    check_growth(watched, 2)


def test_a_thread_is_refused_in_one_sentence(busy):
    """A conversation of which only the last message comes is never answered as if it were all."""
    with claude(busy) as client, pytest.raises(anthropic.BadRequestError) as error:
        client.beta.messages.create(
            model="x",
            max_tokens=9,
            messages=[ASK],
            thread={"type": "continue", "previous_message_id": "msg_1"},
        )
    assert error.value.error_code == "thread_unsupported_request"
    assert "send all messages" in str(error.value)


def test_all_helpers_parse_what_was_asked_for(busy):
    """Objects of a class of the client's own, from three APIs, asynchronously."""

    async def ask():
        async with busy.live.async_openai() as client:
            chat = await client.chat.completions.parse(
                model="x", messages=[ASK], response_format=Tree
            )
            response = await client.responses.parse(model="x", input=[ASK], text_format=Tree)
        async with claude(busy, anthropic.AsyncAnthropic) as client:
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
    launch = (sys.executable, "-m", "keepwarm", "launch", "any", "--url", url, "--run", "--")
    ended = subprocess.run(
        [*launch, *map(str, command)],
        env={"PATH": f"{frameworks}:{os.environ['PATH']}", "HOME": str(frameworks), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.soak
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_openai_agents(watched, frameworks, api):
    said = run(frameworks, watched.url, "python", EXAMPLES / "openai_agents.py", api)
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


@pytest.mark.soak
def test_pydantic_ai(watched, frameworks):
    check_talk(watched, run(frameworks, watched.url, "python", HERE / "talks.py", "pydantic_ai"))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["litellm", "llama_index"])
def test_agents_with_an_older_sdk(watched, older, name):
    check_talk(watched, run(older, watched.url, "python", HERE / "talks.py", name, **OFFLINE))


@pytest.mark.soak
def test_the_ai_sdk(watched):
    if shutil.which("npm") is None:
        pytest.skip("needs `npm`")
    with tempfile.TemporaryDirectory() as place:
        options = ("--prefix", place, "--no-audit", "--no-fund", "--silent")
        subprocess.run(["npm", "install", *options, *AI_SDK], check=True, capture_output=True)
        program = shutil.copy(HERE / "ai_sdk.mjs", place)
        programs = Path(place, "node_modules", ".bin")
        check_talk(watched, run(programs, watched.url, "node", program))


def check_talk(watched, said):
    """Two answers; a call of the tool and its result in between."""
    assert len(said.splitlines()) == 2
    assert watched.refused == []
    check_growth(watched, 3)


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
