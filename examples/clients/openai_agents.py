"""The openai-agents SDK: a run with a tool, and a second question in the same conversation.

keepwarm launch any -- python examples/clients/openai_agents.py responses
"""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    RunResult,
    function_tool,
    set_tracing_disabled,
)


@function_tool
def count_leaves(tree: str) -> str:
    """Count the leaves of a tree."""
    return f"The {tree} has four leaves."


async def main(api: str) -> None:
    client = AsyncOpenAI()
    name = (await client.models.list()).data[0].id
    models: dict[str, type[Model]] = {
        "responses": OpenAIResponsesModel,
        "chat": OpenAIChatCompletionsModel,
    }
    model = models[api](name, client)  # type: ignore[call-arg]
    agent = Agent("Gardener", instructions="You know trees.", tools=[count_leaves], model=model)
    first = await Runner.run(agent, "How many leaves has the oak?")
    show(first)
    question = {"role": "user", "content": "And in winter?"}
    show(await Runner.run(agent, [*first.to_input_list(), question]))


def show(result: RunResult) -> None:
    usage = result.context_wrapper.usage
    cached = usage.input_tokens_details.cached_tokens
    print(f"{result.final_output} ({cached} of {usage.input_tokens} prompt tokens from the cache)")


set_tracing_disabled(disabled=True)  # tracing would send the conversation to OpenAI
asyncio.run(main(sys.argv[1] if sys.argv[1:] else "responses"))
