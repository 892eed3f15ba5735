"""A conversation with a tool through litellm's providers for Ollama. Prints one JSON object."""

import json
import os
import sys

import litellm

FUNCTION = {
    "name": "count_leaves",
    "description": "Counts leaves.",
    "parameters": {
        "type": "object",
        "properties": {"tree": {"type": "string"}},
        "required": ["tree"],
    },
}


def ask(messages, **options):
    return litellm.completion(
        model="ollama_chat/tiny", api_base=os.environ["OLLAMA_HOST"], messages=messages, **options
    )


def main():
    tools = [{"type": "function", "function": FUNCTION}]
    messages = [{"role": "user", "content": "How many leaves has the oak?"}]
    message = ask(messages, tools=tools).choices[0].message
    (call,) = message.tool_calls
    messages.append(message.model_dump(exclude_none=True))
    result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name}
    messages.append({**result, "content": "The oak has four leaves."})
    stream = ask(messages, tools=tools, stream=True)
    parts = [part.choices[0].delta.content or "" for part in stream]
    schema = {"type": "object", "properties": {"deciduous": {"type": "boolean"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "tree", "schema": schema}}
    tree = ask(messages[:1], response_format=wanted, max_tokens=400, temperature=0)
    text = litellm.completion(
        model="ollama/tiny", api_base=os.environ["OLLAMA_HOST"], messages=messages[:1], max_tokens=9
    )
    said = {
        "name": call.function.name,
        "arguments": json.loads(call.function.arguments),
        "streamed": "".join(parts),
        "object": tree.choices[0].message.content,
        "text": text.choices[0].message.content,
        "prompt_tokens": text.usage.prompt_tokens,
    }
    sys.stdout.write(f"{json.dumps(said)}\n")


main()
