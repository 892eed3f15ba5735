"""The Anthropic SDK's tool runner: it runs the tool and asks again until there is an answer.

keepwarm launch any -- python examples/clients/anthropic_tools.py
"""

from __future__ import annotations

from anthropic import Anthropic, beta_tool


@beta_tool
def count_leaves(tree: str) -> str:
    """Count the leaves of a tree.

    Args:
        tree: The kind of tree.
    """
    return f"The {tree} has four leaves."


runner = Anthropic().beta.messages.tool_runner(
    model="served",
    max_tokens=100,
    temperature=0,
    tools=[count_leaves],
    messages=[{"role": "user", "content": "How many leaves has the oak?"}],
)
for message in runner:
    usage = message.usage
    parts = [getattr(block, "text", "") or block.type for block in message.content]
    print(f"{' '.join(parts)} ({usage.cache_read_input_tokens} prompt tokens from the cache)")
