"""Requests to the engine and the events of its answers: plain values, no MLX.

`Engine.submit` takes a `Request` and returns an answer that yields these events, in this order:

    Started, Progress*, Scored*, Embedded*, (Delta | ToolCallDelta | ToolCalled | Finished)*, Done

If an answer fails, iterating it raises the error instead of yielding Done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from keepwarm.errors import BadInput, KeepwarmError
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.turn import KeptTurn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Message: TypeAlias = Mapping[str, Any]  # as in OpenAI's API: role, content (text), tool_calls, …
Tool: TypeAlias = Mapping[str, Any]  # {"type": "function", "function": {name, description, …}}
SYSTEM_ROLES = ("system", "developer")
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
Vector: TypeAlias = "NDArray[np.float32]"
Inexact: TypeAlias = Literal[
    "quantised", "bounded", "imported", "numerics", "unverified", "drifts", "q8", "q4"
]  # `Lane.inexact` says what each one means


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, and when the answer ends.

    From `temperature` to `repetition_penalty` None means the engine's default: the setting, else
    what the model's `generation_config.json` says, else greedy decoding.
    """

    max_tokens: int | None = None  # None: up to the end of the context
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None  # 1: all tokens
    top_k: int | None = None  # 0: all tokens
    min_p: float | None = None  # relative to the most likely token; 0: all tokens
    repetition_penalty: float | None = None  # of tokens in prompt and answer; 1: none
    presence_penalty: float = 0.0  # of tokens in the answer, once
    frequency_penalty: float = 0.0  # of tokens in the answer, for each occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id, -100 to 100
    seed: int | None = None  # None: a random one
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only
    stop: tuple[str, ...] = ()  # stop strings; the answer ends before the first that matches
    ignore_eos: bool = False  # tokens that end an answer are not drawn


@dataclass(frozen=True)
class KVOptions:
    """How keys and values are stored in the cache, named as in mlx-lm.

    Blocks computed with one choice are never reused with another.
    """

    max_kv_size: int | None = None  # tokens of a rotating cache; None: unlimited
    kv_bits: int | None = None  # None: not quantised
    kv_group_size: int = 64
    quantized_kv_start: int = 0  # the first token that is quantised
    at_rest: str = "exact"  # or q8, q4: stored in fewer bits

    def __post_init__(self) -> None:
        if self.quantized_kv_start < 0:
            raise BadInput(
                f"quantized_kv_start is {self.quantized_kv_start}; it must be 0 or more."
            )


@dataclass(frozen=True)
class Format:
    """A constraint on the answer. Set one of the fields."""

    json: bool = False  # any JSON object
    schema: Mapping[str, Any] | None = None  # JSON that matches this JSON schema
    grammar: str | None = None  # text that matches this grammar: llguidance's Lark, or GBNF
    strict: bool = False  # refuse schemas with keywords that no grammar expresses


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model calls tools.

    `auto`: it decides; `none`: it does not; `required`: it must. With a `name` it must call that
    tool.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True  # several calls in one answer

    @property
    def is_forced(self) -> bool:
        return self.mode == "required" or self.name is not None


@dataclass(frozen=True)
class Breakpoint:
    """A cache breakpoint: pin the prompt up to the end of a message until the TTL ends."""

    message: int  # index into messages; -1: the tools alone, before any message
    ttl_s: float | None = None  # None: five minutes


class Arrival(NamedTuple):
    """When a request came, in seconds of `time.perf_counter`."""

    began: float  # its first byte
    read: float  # all of it


@dataclass(frozen=True)
class KnownHistory:
    """A conversation so far, for a request that continues it."""

    tokens: Sequence[int] = ()  # up to the end of its last answer; empty if they are lost
    turn: KeptTurn | None = None  # its messages, if they were kept


@dataclass(frozen=True)
class Request:
    """A prompt, either `messages` or a raw `prompt`, and options for its answer."""

    messages: Sequence[Message] | None = None
    prompt: str | Sequence[int] | None = None  # text or token ids, without a chat template
    partial_answer: bool = False  # the last message is the beginning of the answer
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool | None = None  # reasoning on or off; None: the chat template's default
    template_options: Mapping[str, Any] = field(default_factory=dict)  # for the chat template
    format: Format | None = None
    sampling: Sampling = Sampling()
    n: int = 1  # choices: independent answers to the same prompt
    score_prompt: bool = False  # logprobs of the prompt too; with Policy.NO_STORE
    embed: bool = False  # the vector of the prompt instead of an answer
    kv: KVOptions = KVOptions()  # if these are the defaults: the engine's own
    exact: bool = False  # keys and values as the model computes them, whatever the engine's options
    policy: Policy = Policy.READ_WRITE
    agent: str | None = None  # names the conversation in the store; reuse needs no name
    nameless: bool = False  # `agent` is a name in this process only: no agent is recorded
    continues: bool = False  # messages or prompt are only what is new in the agent's conversation
    history: KnownHistory | None = None  # what they continue; the engine finds it
    tenant: str = ""  # tenants never reuse each other's blocks
    caller: str = ""  # callers alternate, and each leaves places to others; "": as the tenant
    breakpoints: Sequence[Breakpoint] = ()
    scrubbed: tuple[str, ...] = ()  # scrubbing rules that were applied, for the receipt
    unread: tuple[str, ...] = ()  # kinds of parts that became a note, for the receipt
    ignored_fields: tuple[str, ...] = ()  # of the caller's request, for the receipt
    timeout_s: float | None = None  # of the whole request; None: no limit
    priority: int = 0  # higher goes first
    explain: bool = False  # the receipt says why tokens were computed, and where time went
    speculation: bool = True  # False: a token a step, whatever the engine's setting is
    request_id: str = ""  # the caller's name for it, for the log and the dashboard
    client: str = ""  # the program that sent it, for the agent's title
    arrival: Arrival | None = None  # None: when the engine is called

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise BadInput(f"timeout_s is {self.timeout_s}; it must be above 0, or None.")
        if self.score_prompt and (self.policy.reads or self.sampling.top_logprobs is None):
            raise BadInput(
                "score_prompt needs Policy.NO_STORE, because restored keys and values have no "
                "logits, and sampling.top_logprobs."
            )
        if self.embed and (self.messages is not None or self.score_prompt):
            raise BadInput("embed needs a prompt, and cannot be combined with score_prompt.")
        if self.exact and self.kv != KVOptions():
            raise BadInput("exact and kv cannot be combined; choose one.")


class TopLogprob(NamedTuple):
    """One of the most likely tokens at a position."""

    token: int
    logprob: float


class TokenInfo(NamedTuple):
    """A generated token; log-probabilities only if `top_logprobs` is set."""

    token: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()  # the most likely tokens, best first


class ToolCall(NamedTuple):
    """A call of a tool by the model."""

    id: str
    name: str
    arguments: str  # JSON


MissCause: TypeAlias = Literal[
    "new",
    "diverged",
    "compacted",
    "evicted",
    "not computed",
    "no checkpoint",
    "not worth loading",
    "damaged",
    "unreadable",
    "refused layout",
    "failed",
    "disabled",
]


@dataclass(frozen=True)
class Miss:
    """Why not more of a prompt was reused. Positions only, no text.

    new                 no earlier prompt of this tenant begins like it, or all was reused
    diverged            an earlier prompt differs from `nearest` on
    compacted           the prompt quotes an earlier answer: the client has shortened the history
    evicted             more was the same, but is no longer stored
    not computed        more was the same, but that request was cut short after `nearest` tokens
    no checkpoint       more is stored, up to `nearest`, but no state or window to continue from:
                        most of what was computed
    not worth loading   more is stored, but computing it is faster
    damaged             a record of it did not match its digests, and was quarantined
    unreadable          a record could not be read, or is of a newer Keepwarm
    refused layout      a record did not fit the model, and was quarantined
    failed              restoring failed otherwise; the log has the error
    disabled            the request's cache policy does not read
    """

    position: int  # the first token that was not reused
    message: int | None  # the message it belongs to
    reason: MissCause
    nearest: int = 0  # tokens in common with the most similar earlier prompt that were computed


@dataclass(frozen=True)
class Receipt:
    """How much of a prompt was reused, and how much was computed."""

    prompt_tokens: int
    reused: Mapping[str, int]  # tokens by tier: live, memory, disk, shared
    recomputed: int  # prompt tokens that were prefilled
    saved_ms: float | None  # what prefilling them took, less the time to restore; None: unknown
    inexact: tuple[Inexact, ...] = ()  # why keys and values may differ from those of a cold run
    lossy_tokens: int | None = None  # of those reused, rounded at rest; None: none was
    spliced: int = 0  # tokens of past answers, used as they were generated
    scrubbed: tuple[str, ...] = ()  # scrubbing rules that were applied
    reordered: tuple[str, ...] = ()  # parts of the prompt that were moved
    unread: tuple[str, ...] = ()  # kinds of parts, such as image, replaced by a note
    ignored_fields: tuple[str, ...] = ()  # fields of the request that have no effect here
    miss: Miss | None = None  # only if the request asks to `explain`
    repeated_calls: tuple[str, ...] = ()  # in Done: ids of calls that repeat the previous round's
    durable: bool | None = None  # in Done, with Policy.DURABLE: whether all of it is on disk
    shared: int | None = None  # in Done: prompt tokens that another machine would restore
    continued: int | None = None  # known tokens that the prompt begins with, if it continues them
    scored: int | None = None  # prompt tokens computed for their logprobs
    phases_ms: Mapping[str, float] | None = None  # in Done, with `explain`: parts of `ttft_ms`
    speculation: Mapping[str, int] | None = None  # in Done: steps, drafted and accepted tokens

    @property
    def exact(self) -> bool:
        """Whether keys and values are those that this model computes, as far as is known."""
        return not self.inexact

    @property
    def cached_tokens(self) -> int:
        """Tokens reused from all tiers."""
        return sum(self.reused.values())


@dataclass(frozen=True)
class Usage:
    """Token counts and speed of one request."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, reused
    completion_tokens: int  # of all choices, stop tokens included
    reasoning_tokens: int  # of the completion
    ttft_ms: float  # time to first token, from the first byte of the request
    tokens_per_second: float  # while decoding


@dataclass(frozen=True)
class Started:
    """The cached prefix is restored; nothing is computed yet."""

    receipt: Receipt


@dataclass(frozen=True)
class Progress:
    """Prefill progress; also sent every second while the request waits."""

    done: int  # prompt tokens in the cache so far
    total: int


@dataclass(frozen=True)
class Scored:
    """The prompt's tokens with their logprobs, if requested; the first has none."""

    choice: int  # the first of this prompt
    tokens: tuple[TokenInfo, ...]


@dataclass(frozen=True, eq=False)
class Embedded:
    """The vector of the prompt: the hidden state of its last token, scaled to length 1."""

    vector: Vector


@dataclass(frozen=True)
class Delta:
    """New text of one choice, or of the reasoning before it."""

    choice: int
    text: str = ""
    reasoning: str = ""
    tokens: tuple[TokenInfo, ...] = ()  # generated since the last event of this choice


@dataclass(frozen=True)
class ToolCallDelta:
    """New text of a call that the model is writing, in formats whose calls are JSON.

    Joined, the pieces are the arguments of the `ToolCalled` that follows. If none with this id
    follows, the call was cut off or malformed, and comes as text.
    """

    choice: int
    id: str
    name: str
    arguments: str  # the new part of them


@dataclass(frozen=True)
class ToolCalled:
    """The model calls a tool. The call is complete; several may follow each other."""

    choice: int
    call: ToolCall
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True)
class Finished:
    """One choice is complete."""

    choice: int
    reason: FinishReason  # why it ended
    stop: str | None = None  # the stop string that ended it
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True)
class Done:
    """All choices are complete."""

    usage: Usage
    receipt: Receipt  # that of Started, with what the answer adds


Event: TypeAlias = (
    Started | Progress | Scored | Embedded | Delta | ToolCallDelta | ToolCalled | Finished | Done
)


@dataclass(frozen=True)
class Choice:
    """One complete answer, collected from its events."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    reason: FinishReason  # why it ended
    stop: str | None  # the stop string that ended it
    tokens: tuple[TokenInfo, ...]


@dataclass(frozen=True)
class Result:
    """The complete answers to a request."""

    choices: tuple[Choice, ...]
    usage: Usage
    receipt: Receipt
    scored: Mapping[int, tuple[TokenInfo, ...]] = field(default_factory=dict)  # by `Scored.choice`
    vector: Vector | None = None  # of the prompt, if the request asks to `embed`


Outcome: TypeAlias = Event | KeepwarmError
