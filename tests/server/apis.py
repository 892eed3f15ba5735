"""The APIs as one: how each asks for the same thing, and what its answers and streams say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import anthropic.types
import ollama
import openai.types.chat
import openai.types.responses
from pydantic import BaseModel, TypeAdapter, ValidationError

from keepwarm import config
from keepwarm.errors import BadField
from keepwarm.server.anthropic import request as messages_request
from keepwarm.server.anthropic.request import MessagesRequest
from keepwarm.server.http.problems import validation_problem
from keepwarm.server.ollama import request as ollama_request
from keepwarm.server.ollama.request import OllamaChatRequest
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest
from keepwarm.server.responses import request as responses_request
from keepwarm.server.responses.request import ResponsesRequest
from keepwarm.text.request import Request

Fields = dict[str, Any]
PLACES = ("here", "there")
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": list(PLACES)}},
    "required": ["place"],
    "additionalProperties": False,
}
HELLO = {"role": "user", "content": "Hello"}
CALLER = Request(tenant="t", agent="me", timeout_s=60.0)
SETTINGS = config.load({})
FUNCTION = {"name": "weather", "description": "The weather at a place.", "parameters": SCHEMA}


class ReadAnswer(NamedTuple):
    """What a client finds in an answer, of any API."""

    text: str
    is_cut: bool  # by the number of tokens
    n_prompt: int
    n_cached: int | None  # None: the API does not say
    n_output: int
    receipt: Fields
    calls: Sequence[tuple[str, str, Fields]] = ()  # id, name, arguments; only those that are whole
    reasoning: str = ""


class Problem(NamedTuple):
    message: str
    kind: str | None  # None: the API has none


class Api:
    """One API: bodies for a question, and how its answers are read."""

    name: ClassVar[str]
    path: ClassVar[str]
    answer: ClassVar[type[BaseModel]]  # of the official client
    event: ClassVar[Any]  # of its streams
    shape: ClassVar[type[BaseModel]]
    least: ClassVar[Fields] = {"messages": [HELLO]}  # that a body needs

    def request(self, fields: Fields, settings: config.Settings = SETTINGS) -> Request:
        """What the engine is asked by a body with these fields."""
        return self.request_of(self.shape.model_validate(self.least | fields), settings)

    def request_of(self, body: Any, settings: config.Settings) -> Request:
        raise NotImplementedError

    def refusal(self, fields: Fields, settings: config.Settings = SETTINGS) -> Problem:
        """Why such a body is refused; `kind` is the path of the field."""
        try:
            self.request(fields, settings)
        except BadField as error:
            return Problem(str(error), error.param)
        except ValidationError as error:
            reasons = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            problem = validation_problem(reasons, self.least | fields)
            return Problem(problem.message, problem.param)
        raise AssertionError(f"{fields} is not refused")

    def body(self, text: str, n_tokens: int = 8, **fields: Any) -> Fields:
        """A question; `stop`, `schema` and `tool` as this API takes them.

        A tool is `offered`, or only `one` may be called, or one is `forced`.
        """
        raise NotImplementedError

    def follow_up(self, text: str, answer: Fields, result: str) -> Fields:
        """The question, the calls in the answer to it, and the result of each."""
        raise NotImplementedError

    def going_on(self, text: str, answer: Fields) -> Fields:
        """The question, the answer to it, and the question again."""
        body = self.body(text)
        body["messages"] += [self.said(answer), *body["messages"]]
        return body

    def said(self, answer: Fields) -> Fields:
        """The answer as a message."""
        raise NotImplementedError

    def read(self, answer: Fields) -> ReadAnswer:
        raise NotImplementedError

    def whole(self, stream: str) -> Fields:
        """The answer that the events of a stream amount to."""
        raise NotImplementedError

    def events(self, stream: str) -> list[Fields]:
        """Checked by the types of the official client."""
        found = events_of(stream)
        for event in found:
            adapter(self.event).validate_python(event)
        return found

    def problem(self, error: Fields) -> Problem:
        assert error["error"].keys() == {"message", "type", "param", "code"}
        return Problem(error["error"]["message"], error["error"]["type"])

    def failed(self, stream: str) -> str:
        """The message of a stream that ended with an error."""
        return self.problem(events_of(stream)[-1]).message


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parsed(arguments: str) -> Fields | None:
    """None if they are not whole."""
    try:
        value: Fields = json.loads(arguments)
    except ValueError:
        return None
    return value


def named_events(stream: str) -> list[Fields]:
    """Each has the name of its type."""
    found = events_of(stream)
    assert re.findall(r"^event: (.*)$", stream, re.MULTILINE) == [each["type"] for each in found]
    return found


def events_of(stream: str) -> list[Fields]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


class ChatApi(Api):
    name, path = "chat", "/v1/chat/completions"
    answer = openai.types.chat.ChatCompletion
    event = openai.types.chat.ChatCompletionChunk
    shape = ChatRequest

    def request_of(self, body: Any, settings: config.Settings) -> Request:
        return chat.request_of(body, CALLER, settings)

    def body(self, text: str, n_tokens: int = 8, **fields: Any) -> Fields:
        body: Fields = {"messages": [{"role": "user", "content": text}], "max_tokens": n_tokens}
        if tool := fields.pop("tool", None):
            body["tools"] = [{"type": "function", "function": FUNCTION}]
            body["tool_choice"] = "required" if tool == "forced" else "auto"
            body["parallel_tool_calls"] = tool == "offered"
        if schema := fields.pop("schema", None):
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        if fields.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return body | fields

    def follow_up(self, text: str, answer: Fields, result: str) -> Fields:
        body, message = self.body(text, tool="offered"), self.said(answer)
        ids = [call["id"] for call in message["tool_calls"]]
        results = [{"role": "tool", "tool_call_id": each, "content": result} for each in ids]
        body["messages"] += [message, *results]
        return body

    def said(self, answer: Fields) -> Fields:
        message: Fields = answer["choices"][0]["message"]
        return message

    def read(self, answer: Fields) -> ReadAnswer:
        (choice,), usage = answer["choices"], answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        message = choice["message"]
        made = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        calls = [(i, each["name"], parsed(each["arguments"])) for i, each in made]
        whole = [(i, name, given) for i, name, given in calls if given is not None]
        assert (choice["finish_reason"] == "tool_calls") == bool(whole)
        assert message.get("reasoning_content") == message.get("reasoning")
        return ReadAnswer(
            message["content"] or "",
            choice["finish_reason"] == "length",
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            answer["keepwarm"],
            whole,
            message.get("reasoning") or "",
        )

    def whole(self, stream: str) -> Fields:
        assert stream.endswith("data: [DONE]\n\n")
        *chunks, last = self.events(stream)
        texts = ("content", "role", "reasoning", "reasoning_content")
        message: Fields = {**dict.fromkeys(texts, ""), "tool_calls": []}
        reason = None
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            delta, reason = choice["delta"], choice["finish_reason"]
            for name in texts:
                message[name] += delta.get(name, "")
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(piece)
                else:
                    function = message["tool_calls"][piece["index"]]["function"]
                    function["arguments"] += piece["function"]["arguments"]
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return last | {"object": "chat.completion", "choices": [choice]}


def no_fill_in() -> Any:
    raise BadField("The model has no tokens for a suffix.", "suffix")


class TextApi(ChatApi):
    name, path = "text", "/v1/completions"
    answer = openai.types.Completion
    event = dict  # the type of the client is not that of chunks, which have no reason yet
    shape, least = CompletionRequest, {"prompt": "Hello"}

    def request_of(self, body: Any, settings: config.Settings) -> Request:
        return completions.requests_of(body, CALLER, no_fill_in)[0]

    def body(self, text: str, n_tokens: int = 8, **fields: Any) -> Fields:
        body = super().body(text, n_tokens, **fields)
        del body["messages"]
        if "response_format" in body:
            body["json_schema"] = body.pop("response_format")["json_schema"]["schema"]
        return body | {"prompt": text}

    def read(self, answer: Fields) -> ReadAnswer:
        (choice,) = answer["choices"]
        message = {"content": choice["text"]}
        return super().read(answer | {"choices": [choice | {"message": message}]})

    def whole(self, stream: str) -> Fields:
        *chunks, last = self.events(stream)
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(choice["text"] for choice in choices)
        return last | {"choices": [choices[-1] | {"text": text}]}


class MessagesApi(Api):
    name, path = "messages", "/v1/messages"
    answer = anthropic.types.Message
    event = anthropic.types.RawMessageStreamEvent
    shape, least = MessagesRequest, {"messages": [HELLO], "max_tokens": 9}

    def request_of(self, body: Any, settings: config.Settings) -> Request:
        return messages_request.request_of(body, CALLER, settings)

    def body(self, text: str, n_tokens: int = 8, **fields: Any) -> Fields:
        body: Fields = {"messages": [{"role": "user", "content": text}], "max_tokens": n_tokens}
        if tool := fields.pop("tool", None):
            body["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
            choice = {"type": "any" if tool == "forced" else "auto"}
            body["tool_choice"] = choice | {"disable_parallel_tool_use": tool != "offered"}
        if schema := fields.pop("schema", None):
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        if stop := fields.pop("stop", None):
            body["stop_sequences"] = stop
        return body | fields

    def follow_up(self, text: str, answer: Fields, result: str) -> Fields:
        ids = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        body = self.body(text, tool="offered")
        results = [{"type": "tool_result", "tool_use_id": i, "content": result} for i in ids]
        body["messages"] += [self.said(answer), {"role": "user", "content": results}]
        return body

    def said(self, answer: Fields) -> Fields:
        return {"role": "assistant", "content": answer["content"]}

    def read(self, answer: Fields) -> ReadAnswer:
        usage, blocks = answer["usage"], answer["content"]
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        calls = [b for b in blocks if b["type"] == "tool_use" and b["input"] is not None]
        thoughts = [block for block in blocks if block["type"] == "thinking"]
        assert all(thought["signature"] for thought in thoughts)
        assert (answer["stop_reason"] == "tool_use") == bool(calls)
        return ReadAnswer(
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            answer["stop_reason"] == "max_tokens",
            prompt,
            cached,
            usage["output_tokens"],
            answer["keepwarm"],
            [(call["id"], call["name"], call["input"]) for call in calls],
            "".join(thought["thinking"] for thought in thoughts),
        )

    def events(self, stream: str) -> list[Fields]:
        found = named_events(stream)
        for event in found:
            if event["type"] not in ("ping", "error"):
                adapter(self.event).validate_python(event)
        return found

    def whole(self, stream: str) -> Fields:
        events = self.events(stream)
        assert events[-1]["type"] == "message_stop"
        made = events[0]["message"]
        written: dict[int, str] = {}
        for event in events[1:]:
            match event["type"]:
                case "content_block_start":
                    made["content"].append(event["content_block"])
                case "content_block_delta":
                    block, (_, *pieces) = made["content"][event["index"]], event["delta"].items()
                    for key, value in pieces:
                        if key == "partial_json":
                            written[event["index"]] = written.get(event["index"], "") + value
                        else:
                            block[key] += value
                case "message_delta":
                    made |= event["delta"] | {key: event[key] for key in ("usage", "keepwarm")}
        for index, text in written.items():
            made["content"][index]["input"] = parsed(text)
        return made

    def problem(self, error: Fields) -> Problem:
        assert (error["type"], error["error"].keys() >= {"type", "message"}) == ("error", True)
        return Problem(error["error"]["message"], error["error"]["type"])


class ResponsesApi(Api):
    name, path = "responses", "/v1/responses"
    answer = openai.types.responses.Response
    event = openai.types.responses.ResponseStreamEvent
    shape, least = ResponsesRequest, {"input": "Hello"}

    def request_of(self, body: Any, settings: config.Settings) -> Request:
        items = responses_request.items_of(body.input)
        return responses_request.request_of(body, items, CALLER, settings)

    def body(self, text: str, n_tokens: int = 8, **fields: Any) -> Fields:
        items = [{"role": "user", "content": text}]
        body: Fields = {"input": items, "max_output_tokens": n_tokens, "store": False}
        if tool := fields.pop("tool", None):
            body["tools"] = [{"type": "function", **FUNCTION}]
            body["tool_choice"] = "required" if tool == "forced" else "auto"
            body["parallel_tool_calls"] = tool == "offered"
        if schema := fields.pop("schema", None):
            body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        return body | fields

    def follow_up(self, text: str, answer: Fields, result: str) -> Fields:
        ids = [i["call_id"] for i in answer["output"] if i["type"] == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": each, "output": result} for each in ids
        ]
        body = self.body(text, tool="offered")
        body["input"] += [*answer["output"], *outputs]
        return body

    def going_on(self, text: str, answer: Fields) -> Fields:
        body = self.body(text)
        body["input"] += [*answer["output"], *body["input"]]
        return body

    def read(self, answer: Fields) -> ReadAnswer:
        usage, items = answer["usage"], answer["output"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        is_cut = answer["status"] == "incomplete"
        assert (answer["incomplete_details"] == {"reason": "max_output_tokens"}) == is_cut
        messages = [item for item in items if item["type"] == "message"]
        calls = [i for i in items if i["type"] == "function_call" and i["status"] == "completed"]
        thoughts = [item["content"] for item in items if item["type"] == "reasoning"]
        return ReadAnswer(
            "".join(part["text"] for message in messages for part in message["content"]),
            is_cut,
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
            answer["keepwarm"],
            [(call["call_id"], call["name"], json.loads(call["arguments"])) for call in calls],
            "".join(part["text"] for parts in thoughts for part in parts),
        )

    def events(self, stream: str) -> list[Fields]:
        found = named_events(stream)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        for event in found:
            adapter(self.event).validate_python(event)
        return found

    def whole(self, stream: str) -> Fields:
        events = self.events(stream)
        response: Fields = events[-1]["response"]
        assert events[-1]["type"] == f"response.{response['status']}"
        text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        assert text == self.read(response).text
        return response

    def failed(self, stream: str) -> str:
        last = events_of(stream)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        message: str = last["response"]["error"]["message"]
        return message


class OllamaApi(Api):
    name, path = "ollama", "/api/chat"
    answer = event = ollama.ChatResponse
    shape, least = OllamaChatRequest, {"model": "m", "messages": [HELLO]}

    def request_of(self, body: Any, settings: config.Settings) -> Request:
        return ollama_request.chat_request(body, body.messages, CALLER, settings)

    def body(self, text: str, n_tokens: int = 8, **fields: Any) -> Fields:
        options = {"num_predict": n_tokens, "temperature": 0}
        if stop := fields.pop("stop", None):
            options["stop"] = stop
        if fields.pop("tool", None):  # none can be forced
            fields["tools"] = [{"type": "function", "function": FUNCTION}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        format_ = {"format": schema} if (schema := fields.pop("schema", None)) else {}
        return {**body, "options": options, "stream": False, "truncate": False, **format_} | fields

    def follow_up(self, text: str, answer: Fields, result: str) -> Fields:
        body, message = self.body(text, tool="offered"), answer["message"]
        names = [call["function"]["name"] for call in message["tool_calls"]]
        results = [{"role": "tool", "tool_name": name, "content": result} for name in names]
        body["messages"] += [message, *results]
        return body

    def read(self, answer: Fields) -> ReadAnswer:
        assert answer["done"]
        message = answer["message"]
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        return ReadAnswer(
            message["content"],
            answer["done_reason"] == "length",
            answer["prompt_eval_count"],
            None,
            answer["eval_count"],
            answer["keepwarm"],
            [(i, function["name"], function["arguments"]) for i, function in calls],
            message.get("thinking", ""),
        )

    def whole(self, stream: str) -> Fields:
        *parts, last = self.events(stream)
        assert not any(part["done"] for part in parts)
        messages = [part["message"] for part in parts]
        made: Fields = {"tool_calls": [c for m in messages for c in m.get("tool_calls", ())]}
        for name in ("content", "thinking"):
            made[name] = "".join(message.get(name, "") for message in messages)
        return last | {"message": last["message"] | made}

    def problem(self, error: Fields) -> Problem:
        assert error.keys() == {"error"}
        return Problem(error["error"], None)

    def failed(self, stream: str) -> str:
        return self.problem(json.loads(stream.splitlines()[-1])).message


CHAT, TEXT, MESSAGES, RESPONSES, OLLAMA = (
    *(ChatApi(), TextApi(), MessagesApi()),
    *(ResponsesApi(), OllamaApi()),
)
APIS = (CHAT, TEXT, MESSAGES, RESPONSES, OLLAMA)
FORCING = (CHAT, MESSAGES, RESPONSES)  # a call of a tool
TALKING = (*FORCING, OLLAMA)  # messages with roles, thoughts and calls
STOPPING = (CHAT, TEXT, MESSAGES, OLLAMA)  # at the client's own strings


def headers(key: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {key}"}
