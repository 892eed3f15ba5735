"""An object of the client's class beside a tool, through frameworks; each prints the object.

`keepwarm launch any -- python formats.py NAME`, where the framework is installed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from pydantic import BaseModel

ASK = "Is the oak deciduous? Count its leaves first."


class Tree(BaseModel):
    deciduous: bool


def count_leaves(tree: str) -> str:
    """Say how many leaves a tree has."""
    return f"The {tree} has four leaves."


def agents_by_chat() -> Any:
    from agents import OpenAIChatCompletionsModel

    return _openai_agents(OpenAIChatCompletionsModel)


def agents_by_responses() -> Any:
    from agents import OpenAIResponsesModel

    return _openai_agents(OpenAIResponsesModel)


def _openai_agents(model: Any) -> Any:
    from openai import AsyncOpenAI

    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(disabled=True)
    served = model("any", AsyncOpenAI())
    agent = Agent("Gardener", tools=[function_tool(count_leaves)], model=served, output_type=Tree)
    return asyncio.run(Runner.run(agent, ASK)).final_output


def pydantic_ai() -> Any:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("any", provider=OpenAIProvider())
    agent = Agent(model, tools=[count_leaves], output_type=NativeOutput(Tree))
    return agent.run_sync(ASK).output


def langchain() -> Any:
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy
    from langchain_openai import ChatOpenAI

    agent = create_agent(
        ChatOpenAI(model="any"), [count_leaves], response_format=ProviderStrategy(Tree)
    )
    messages = [{"role": "user", "content": ASK}]
    return agent.invoke({"messages": messages})["structured_response"]


if __name__ == "__main__":
    made = (agents_by_chat, agents_by_responses, pydantic_ai, langchain)
    found = {each.__name__: each for each in made}[sys.argv[1]]()
    sys.stdout.write(f"{found!r}\n")
