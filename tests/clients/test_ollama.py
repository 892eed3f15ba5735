"""The published clients of Ollama's API: Python's here, JavaScript's and litellm in `make soak`."""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import ollama
import pytest

from tests.clients.test_frameworks import (
    AGAIN,
    ASK,
    CALL,
    OFFLINE,
    OLDER,
    check_growth,
    count_leaves,
    environment,
)

HERE = Path(__file__).parent
NPM = "ollama@0.6.4"


@pytest.fixture
def watched(watching):
    with watching(CALL) as watched:
        yield watched


def test_functions_are_tools(watched):
    """The client describes the function, gets a call without an id, and sends its result back."""
    asked = {"model": "tiny", "tools": [count_leaves]}
    said = [ASK]

    async def stream():
        parts = []
        async with ollama.AsyncClient(host=watched.url, verify=False) as client:
            async for part in await client.chat(messages=said, **asked, stream=True):
                parts.append(part)
        return parts

    with ollama.Client(host=watched.url, verify=False) as client:
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
    assert watched.refused == []
    check_growth(watched, 3)


def run(watched, *command, **environ):
    """What a program printed that finds the server by its variable."""
    ended = subprocess.run(
        [*map(str, command)],
        env={"PATH": os.environ["PATH"], "OLLAMA_HOST": watched.url, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.soak
def test_litellm(watched):
    with environment(OLDER) as programs:
        python, program = programs / "python", HERE / "litellm_ollama.py"
        said = run(watched, python, program, HOME=str(programs), **OFFLINE)
    assert {said["name"]: said["arguments"]} == CALL
    assert said["streamed"]
    assert json.loads(said["object"]).keys() <= {"deciduous"}
    assert said["text"]
    assert said["prompt_tokens"] > 0
    assert watched.refused == []


@pytest.mark.soak
def test_javascript(watched):
    if shutil.which("npm") is None:
        pytest.skip("needs `npm`")
    with tempfile.TemporaryDirectory() as place:
        options = ("--prefix", place, "--no-audit", "--no-fund", "--silent")
        subprocess.run(["npm", "install", *options, NPM], check=True, capture_output=True)
        program = shutil.copy(HERE / "ollama_client.mjs", place)
        said = run(watched, "node", program)
    assert {said["call"]["name"]: said["call"]["arguments"]} == CALL
    assert said["streamed"]
    assert said["third"]
    assert said["done"] is True
    assert said["object"]["deciduous"] in (True, False)
    assert said["listed"] == said["loaded"] == "tiny:latest"
    assert said["capabilities"] == ["completion", "tools"]
    assert said["failed"] == 404
    assert [each for each in watched.refused if each[1] != "/api/show"] == []
    check_growth(watched, 3)
