"""Conversations through frameworks: a question, a tool, an answer, another question.

`keepwarm launch any -- python talks.py NAME`, where the framework is installed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from pydantic import BaseModel

URL = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]
ASK, AGAIN = "How many leaves has the oak?", "And in winter?"
DESCRIBED = {
    "name": "count_leaves",
    "description": "Say how many leaves a tree has.",
    "parameters": {
        "type": "object",
        "properties": {"tree": {"type": "string"}},
        "required": ["tree"],
    },
}
TOOLS = [{"type": "function", "function": DESCRIBED}]


class Tree(BaseModel):
    deciduous: bool


def count_leaves(tree: str) -> str:
    """Say how many leaves a tree has."""
    return f"The {tree} has four leaves."


def show(said: object) -> None:
    sys.stdout.write(f"{said}\n")


def litellm() -> None:
    import json

    import litellm

    said: list[Any] = []
    for question in (ASK, AGAIN):
        said.append({"role": "user", "content": question})
        while True:
            answer = litellm.completion(
                model="openai/any", api_base=URL, api_key=KEY, messages=said, tools=TOOLS
            )
            message = answer.choices[0].message
            said.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = count_leaves(**json.loads(call.function.arguments))
                said.append({"role": "tool", "tool_call_id": call.id, "content": result})
        show(message.content)


def instructor() -> None:
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY), mode=mode)
        show(
            client.chat.completions.create(
                model="any",
                response_model=Tree,
                messages=[{"role": "user", "content": "Is the oak deciduous?"}],
                max_retries=0,
            )
        )


def pydantic_ai() -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("any", provider=OpenAIProvider())
    agent = Agent(model, tools=[count_leaves])
    first = agent.run_sync(ASK)
    show(first.output)
    show(agent.run_sync(AGAIN, message_history=first.all_messages()).output)


def llama_index() -> None:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.memory import ChatMemoryBuffer
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model="any",
        api_base=URL,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=100_000,
    )
    agent = FunctionAgent(tools=[count_leaves], llm=llm, streaming=False)
    memory = ChatMemoryBuffer.from_defaults(token_limit=50_000)

    async def talk() -> None:
        for question in (ASK, AGAIN):
            show(await agent.run(question, memory=memory))

    asyncio.run(talk())


if __name__ == "__main__":
    talks = (litellm, instructor, pydantic_ai, llama_index)
    {talk.__name__: talk for talk in talks}[sys.argv[1]]()
