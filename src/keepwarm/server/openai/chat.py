"""Chat completions: OpenAI's request to an engine request, the answer to OpenAI's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepwarm.config import Settings
from keepwarm.errors import BadField
from keepwarm.server.http.body import token_limit
from keepwarm.server.http.content import Unread, content_of
from keepwarm.server.http.receipts import receipt_dict
from keepwarm.server.http.request_fields import RequestFields
from keepwarm.server.http.scrub import SYSTEM_ROLES
from keepwarm.server.openai.calls import CallStyle, offered_tools, past_calls, tool_choice_of
from keepwarm.server.openai.chunks import Chunks, CompletionMeta, usage_dict
from keepwarm.server.openai.formats import format_of
from keepwarm.server.openai.shapes import (
    BaseCompletionRequest,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatMessageOut,
    ChatRequest,
)
from keepwarm.server.openai.tokens import Pieces, chat_logprobs
from keepwarm.text.request import (
    Choice,
    Delta,
    Done,
    Event,
    Finished,
    Message,
    Request,
    Result,
    Sampling,
    Started,
    TokenInfo,
    ToolCallDelta,
    ToolCalled,
)

NOT_THINKING = frozenset({"none", "minimal"})
SEEDS = 1 << 63
MAX_DIGITS = 9  # of a token's id
MAX_SHOWN, MAX_NAMED = 40, 3  # characters of a wrong key, and wrong keys


# Request


def request_of(body: ChatRequest, fields: RequestFields, settings: Settings) -> Request:
    tools = offered_tools(body)
    options = dict(body.chat_template_kwargs or {})
    thinking = options.pop("enable_thinking", None)
    is_partial = _is_partial(body, options.pop("continue_final_message", None))
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
        thinking = body.reasoning_effort not in NOT_THINKING if thinking is None else thinking
    unread = Unread("" if settings.skip_unreadable else _newest(body.messages))
    return Request(
        messages=[_message(message, i, unread) for i, message in enumerate(body.messages)],
        partial_answer=is_partial,
        unread=unread.kinds,
        tools=tools,
        tool_choice=tool_choice_of(body, tools),
        thinking=None if thinking is None else bool(thinking),
        template_options=options,
        format=format_of(body),
        sampling=sampling_of(body, _max_tokens(body), _top_logprobs(body)),
        n=body.n or 1,
        **fields._asdict(),
    )


def _is_partial(body: ChatRequest, in_options: object) -> bool:
    """Whether the last message is to be continued."""
    name = "add_generation_prompt"
    continues = bool(body.continue_final_message or in_options)
    if continues and body.add_generation_prompt:
        raise BadField(f"{name} and continue_final_message exclude each other; send one.", name)
    if body.add_generation_prompt is False and not continues:
        raise BadField(
            f"{name} is false, so no answer is asked for; omit it, or set "
            "continue_final_message to continue the last message.",
            name,
        )
    return continues


def sampling_of(
    body: BaseCompletionRequest, max_tokens: int | None, top_logprobs: int | None
) -> Sampling:
    """Sampling options, the same for chat and text completions."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Sampling(
        max_tokens=token_limit(max_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}),
        seed=None if body.seed is None else body.seed % SEEDS,
        top_logprobs=top_logprobs,
        stop=tuple(filter(None, stop)),
    )


def _max_tokens(body: ChatRequest) -> int | None:
    given = body.max_completion_tokens
    return body.max_tokens if given is None else given


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    wrong = [token for token in bias if not (token.isascii() and token.isdigit())]
    wrong += [token for token in bias if len(token) > MAX_DIGITS]
    if wrong:
        raise BadField(
            f"The keys of logit_bias must be token ids, whole numbers of up to {MAX_DIGITS} "
            f"digits, not {', '.join(repr(token[:MAX_SHOWN]) for token in wrong[:MAX_NAMED])}.",
            "logit_bias",
        )
    return {int(token): value for token, value in bias.items()}


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise BadField("top_logprobs needs logprobs; set logprobs to true.", "top_logprobs")
    return None


def _newest(messages: Sequence[ChatMessage]) -> str:
    """Where the newest message is, if it is the user's; system messages may follow it."""
    said = [i for i, message in enumerate(messages) if message.role not in SYSTEM_ROLES]
    return f"messages[{said[-1]}]" if said and messages[said[-1]].role == "user" else ""


def _message(message: ChatMessage, index: int, unread: Unread) -> Message:
    """A message for the chat template; the role `developer` becomes `system`."""
    role = "system" if message.role == "developer" else message.role
    content = content_of(message.content, f"messages[{index}].content", unread)
    result: dict[str, Any] = {"role": role, "content": content} | past_calls(message)
    reasoning = message.reasoning_content or message.reasoning
    named = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
    }
    return {key: value for key, value in named.items() if value is not None} | result


# Answer


def completion(meta: CompletionMeta, result: Result, pieces: Pieces | None) -> ChatCompletion:
    """A complete answer. `pieces` is given if the client asked for logprobs."""
    return {
        "id": meta.id,
        "object": "chat.completion",
        "created": meta.created,
        "model": meta.model,
        "system_fingerprint": meta.fingerprint,
        "choices": [
            _choice(i, choice, pieces, meta.calls) for i, choice in enumerate(result.choices)
        ],
        "usage": usage_dict(result.usage),
        "keepwarm": receipt_dict(result.receipt),
    }


def _choice(index: int, choice: Choice, pieces: Pieces | None, calls: CallStyle) -> ChatChoice:
    message: ChatMessageOut = {
        "role": "assistant",
        "content": None if choice.tool_calls and not choice.text else choice.text,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = message["reasoning"] = choice.reasoning
    if choice.tool_calls:
        message |= calls.message(choice.tool_calls)  # type: ignore[typeddict-item]
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(pieces, choice.tokens),
        "finish_reason": calls.reason(choice.reason),  # type: ignore[typeddict-item]
    }


def _logprobs(pieces: Pieces | None, tokens: Sequence[TokenInfo]) -> ChatLogprobs | None:
    if pieces is None:
        return None
    return {"content": chat_logprobs(pieces, tokens), "refusal": None}


class ChatStream(Chunks):
    """Chunks: the role of each choice, then deltas, finish reasons, usage, `[DONE]`.

    The last chunk has the receipt: the one with the usage, or else the last finish reason.
    """

    def __init__(self, meta: CompletionMeta, n: int, usage: bool, pieces: Pieces | None) -> None:
        super().__init__("chat.completion.chunk", meta, usage)
        self._n = n
        self._pieces = pieces
        self._calls = meta.calls
        self._begun: list[list[str]] = [[] for _ in range(n)]  # ids of tool calls

    def event(self, event: Event) -> bytes:
        match event:
            case Delta():
                return self._release() + self._delta(event)
            case ToolCallDelta() | ToolCalled():
                return self._release() + self._call(event)
            case Finished():
                end = self._choice(event.choice, {}, event.tokens)
                return self._hold(end | {"finish_reason": self._calls.reason(event.reason)})
            case Started():
                role = {"role": "assistant", "content": ""}
                return b"".join(self._chunk(choice, role) for choice in range(self._n))
            case Done():
                return self._done(event)
        return b""

    def _delta(self, event: Delta) -> bytes:
        delta = {}
        if event.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = event.reasoning
        if event.text:  # of a call that was malformed, if one is still open
            self._begun[event.choice] = [""] * len(self._begun[event.choice])
        if event.text or (self._pieces and event.tokens):
            delta["content"] = event.text
        return self._chunk(event.choice, delta, event.tokens) if delta else b""

    def _call(self, event: ToolCallDelta | ToolCalled) -> bytes:
        """A part of a call, or a whole one. The input of a custom tool is known at its end."""
        choice = event.choice
        if isinstance(event, ToolCallDelta):
            if event.name in self._calls.custom:
                return b""
            begun = self._begin_call(choice, event.id, event.name)
            return begun + self._arguments(choice, event.name, event.arguments)
        call = event.call
        if call.id in self._begun[choice]:
            return self._chunk(choice, {}, event.tokens) if self._pieces else b""
        begun = self._begin_call(choice, call.id, call.name, event.tokens)
        return begun + self._arguments(choice, call.name, call.arguments)

    def _begin_call(
        self, choice: int, call_id: str, name: str, tokens: Sequence[TokenInfo] = ()
    ) -> bytes:
        begun = self._begun[choice]
        if call_id in begun:
            return b""
        begun.append(call_id)
        return self._chunk(choice, self._calls.begin(len(begun) - 1, call_id, name), tokens)

    def _arguments(self, choice: int, name: str, arguments: str) -> bytes:
        index = len(self._begun[choice]) - 1
        return self._chunk(choice, self._calls.piece(index, name, arguments))

    def _chunk(self, index: int, delta: dict[str, Any], tokens: Sequence[TokenInfo] = ()) -> bytes:
        return self._framed({"choices": [self._choice(index, delta, tokens)]})

    def _choice(
        self, index: int, delta: dict[str, Any], tokens: Sequence[TokenInfo]
    ) -> dict[str, Any]:
        logprobs = _logprobs(self._pieces, tokens) if tokens else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
