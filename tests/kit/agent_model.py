"""A tiny random model for testing coding agents: long context, real tokenizer, tools.

Such a model generates noise, so a grammar constrains it: `Leading` stands between server and
engine, makes the first answers the calls that a test wants, among the tools offered, and limits
every other answer to a few words of the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.day.template import TOOLS_CHATML
from tokenizers import Tokenizer

from keepwarm.engine.engine import Engine
from keepwarm.server.http.permits import PrepareSlot
from keepwarm.server.models.host import EngineHost, ObservedAnswer
from keepwarm.text.parsing import Markup
from keepwarm.text.request import Format, Request, Tool, ToolChoice
from keepwarm.text.tool_grammar import call_grammar
from tests.kit.checkpoints import write_checkpoint

N_CONTEXT = 131_072
TOKENIZER = Path(__file__).parents[1] / "data" / "clients" / "tokenizer.json"
WORDS = 'start: WORD (" " WORD)~3 "."\nWORD: /[a-z]{2,9}/\n'
SMALL = {"num_attention_heads": 1, "num_key_value_heads": 1}
MAX_SAID = 120  # tokens of an answer: enough for a call

# As Llama 3's: the system text, then the tools in the first message that follows.
LLAMAS_CHATML = r"""
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>user\nAnswer with a call of one of these functions:\n\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n\n' }}{% endfor %}
    {{- messages[0].content + '<|im_end|>\n' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\n<tool_call>\n{"name": "' + tool_call.name }}
        {{- '", "arguments": ' + (tool_call.arguments | tojson) + '}\n</tool_call><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
""".strip()


def write_agent_checkpoint(directory: Path) -> Path:
    """The checkpoint; its tokenizer was trained on Keepwarm's documentation and stays as it is."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    return write_checkpoint(
        directory, n_context=N_CONTEXT, tokenizer=tokenizer, template=TOOLS_CHATML, shape=SMALL
    )


@dataclass(frozen=True)
class Asked:
    """A request as the engine receives it, and its rendered prompt."""

    request: Request
    text: str
    n_tokens: int

    @property
    def roles(self) -> list[str]:
        return [message["role"] for message in self.request.messages or ()]


class Leading(EngineHost):
    """Constrains the model with grammars where the client does not."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        calls: Mapping[str, Mapping[str, Any]],  # arguments by tool, in the order of the calls
    ) -> None:
        super().__init__(engine, name)
        self.asked: list[Asked] = []
        self.calls = calls

    async def submit_all(
        self, requests: Sequence[Request], slot: PrepareSlot
    ) -> list[ObservedAnswer]:
        for request in requests:
            prepared = self.engine.prepare(request)
            self.asked.append(Asked(request, prepared.prompt.text, len(prepared.tokens)))
        return await super().submit_all([self._led(request) for request in requests], slot)

    def _led(self, request: Request) -> Request:
        if request.format or request.tool_choice.mode == "required" or request.messages is None:
            return request
        grammar = self._call(request) or WORDS
        most = min(request.sampling.max_tokens or MAX_SAID, MAX_SAID)
        sampling = replace(request.sampling, max_tokens=most)
        return replace(request, format=Format(grammar=grammar), sampling=sampling)

    def _call(self, request: Request) -> str | None:
        """A grammar for the next planned call, if one is left."""
        offered = {tool["function"]["name"] for tool in request.tools}
        wanted = [name for name in self.calls if name in offered]
        n_done = sum(message["role"] == "tool" for message in request.messages or ())
        if n_done >= len(wanted) or request.tool_choice.mode == "none":
            return None
        name = wanted[n_done]
        markup = Markup.of(self.engine.model.tokenizer)
        return call_grammar([_only(name, self.calls[name])], ToolChoice("required", name), markup)


def _only(name: str, arguments: Mapping[str, Any]) -> Tool:
    """The tool with a schema that allows only these arguments."""
    properties = {key: {"const": value} for key, value in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    parameters = {**schema, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
