"""LangChain: an answer, a stream, an object by schema, a tool call and the answer after it.

keepwarm launch any -- python examples/clients/langchain_models.py openai
"""

from __future__ import annotations

import os
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = HumanMessage("How many leaves has the oak?")


class Tree(BaseModel):
    """A tree and its number of leaves."""

    name: str
    leaves: int


@tool
def count_leaves(tree: str) -> str:
    """Count the leaves of a tree."""
    return f"The {tree} has four leaves."


def make(api: str) -> BaseChatModel:
    if api == "openai":
        return ChatOpenAI(model="served", max_tokens=400, temperature=0)
    return ChatAnthropic(
        model_name="served",
        max_tokens_to_sample=400,
        temperature=0,
        base_url=os.environ["ANTHROPIC_BASE_URL"],
        api_key=os.environ["ANTHROPIC_AUTH_TOKEN"],
    )


def main(api: str) -> None:
    model = make(api)
    print("invoke:", model.invoke([QUESTION]).text)
    print("stream:", "|".join(chunk.text for chunk in model.stream([QUESTION]) if chunk.text))
    options = {"method": "json_schema"} if api == "openai" else {}
    print("object:", repr(model.with_structured_output(Tree, **options).invoke([QUESTION])))
    with_tools = model.bind_tools([count_leaves])
    asked = with_tools.invoke([QUESTION])
    results = [count_leaves.invoke(call) for call in asked.tool_calls]
    print("called:", [result.content for result in results])
    answer = with_tools.invoke([QUESTION, asked, *results])
    usage = answer.usage_metadata
    cached = usage["input_token_details"]["cache_read"]
    print(f"answer: {answer.text} ({cached} of {usage['input_tokens']} tokens from the cache)")


main(sys.argv[1] if sys.argv[1:] else "openai")
