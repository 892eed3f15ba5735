"""What is asked of the engine, and what comes back: plain values, no MLX.

Everything that speaks to people, a session or an HTTP server, speaks to the engine in these words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from keepwarm.cache.policy import Policy
from keepwarm.errors import KeepwarmError

Message: TypeAlias = Mapping[str, Any]  # OpenAI's shape: role, content (text), tool_calls, …
Tool: TypeAlias = Mapping[str, Any]  # {"type": "function", "function": {name, description, …}}
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when the answer ends."""

    max_tokens: int | None = None  # None: as many as the context has room for
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    top_logprobs: int | None = None  # None: no logprobs; 0: only the chosen token's
    stop: tuple[str, ...] = ()  # matched on the text, across tokens; not part of the answer


@dataclass(frozen=True)
class KVOptions:
    """How keys and values are held; another choice is another namespace."""

    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0


@dataclass(frozen=True)
class Format:
    """What the answer must look like. `schema` None with `json` is any JSON object."""

    json: bool = False
    schema: Mapping[str, Any] | None = None
    grammar: str | None = None  # Lark, as llguidance reads it


@dataclass(frozen=True)
class ToolChoice:
    """`auto`: the model decides; `none`: no calls; `required`, or a name: it must call (it)."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True)
class Breakpoint:
    """Keep the prompt up to the end of this message: a checkpoint, and a pin while it lives."""

    message: int  # index into messages; -1: the tools alone, before any message
    ttl_s: float | None = None


@dataclass(frozen=True)
class Request:
    """One prompt, as messages or as raw text or tokens, and all wishes about its answer."""

    messages: Sequence[Message] | None = None
    prompt: str | Sequence[int] | None = None
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool | None = None  # None: as the template does by itself
    template_options: Mapping[str, Any] = field(default_factory=dict)
    format: Format | None = None
    sampling: Sampling = Sampling()
    n: int = 1
    kv: KVOptions = KVOptions()
    policy: Policy = Policy.READ_WRITE
    agent: str | None = None  # whose conversation this is; reuse needs no name
    tenant: str = ""  # another tenant's blocks are never found
    breakpoints: Sequence[Breakpoint] = ()
    scrubbed: tuple[str, ...] = ()  # what was removed before it came here, for the receipt
    timeout_s: float | None = None
    priority: int = 0  # higher goes first
    explain: bool = False  # say why it missed


class TopLogprob(NamedTuple):
    token: int
    logprob: float


class TokenInfo(NamedTuple):
    token: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class Miss:
    """Why tokens were computed that might have been known. Positions only, no text."""

    position: int  # the first token that was not restored
    message: int | None  # the message it stands in
    reason: Literal["new", "diverged", "evicted", "not worth loading", "disabled"]
    nearest: int = 0  # how far the most similar earlier prompt agrees


@dataclass(frozen=True)
class Receipt:
    """What a prompt cost and what it was spared."""

    prompt_tokens: int
    reused: Mapping[str, int]  # tokens by place: live, memory, disk
    recomputed: int  # prompt tokens that the model was fed
    saved_ms: float
    exact: bool  # unquantised, every restored row verified
    spliced: int = 0  # answer tokens put in as they were generated
    scrubbed: tuple[str, ...] = ()
    miss: Miss | None = None
    durable: bool | None = None  # of a durable request, at its end: whether all of it is on disk

    @property
    def cached_tokens(self) -> int:
        return sum(self.reused.values())


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # of all choices together, stop tokens included
    reasoning_tokens: int
    ttft_ms: float
    tokens_per_second: float


# Events of an answer, in this order: Started, Progress*, (Delta | ToolCalled | Finished)*, Done.
# An answer that fails raises its error from the iteration instead of giving Done.


@dataclass(frozen=True)
class Started:
    """The plan is made: how much is restored is known; nothing is computed yet."""

    receipt: Receipt


@dataclass(frozen=True)
class Progress:
    """Prompt tokens in the cache so far; also sent every second while the request waits."""

    done: int
    total: int


@dataclass(frozen=True)
class Delta:
    """New text of one choice: of the answer or of the reasoning before it."""

    choice: int
    text: str = ""
    reasoning: str = ""
    tokens: tuple[TokenInfo, ...] = ()  # what was generated since the last event of this choice


@dataclass(frozen=True)
class ToolCalled:
    """The model calls a tool. `call` is whole; several may follow each other."""

    choice: int
    call: ToolCall
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True)
class Finished:
    choice: int
    reason: FinishReason
    stop: str | None = None  # the stop string that ended it
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True)
class Done:
    usage: Usage
    receipt: Receipt  # with what prefill really took


Event: TypeAlias = Started | Progress | Delta | ToolCalled | Finished | Done


@dataclass(frozen=True)
class Choice:
    """One whole answer, put together from its events."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    reason: FinishReason
    stop: str | None
    tokens: tuple[TokenInfo, ...]


@dataclass(frozen=True)
class Result:
    choices: tuple[Choice, ...]
    usage: Usage
    receipt: Receipt


Outcome: TypeAlias = Event | KeepwarmError
