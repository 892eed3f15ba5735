"""The APIs as one: how each asks for the same thing, and what its answers and streams say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import anthropic.types
import ollama
import openai.types.chat
import openai.types.responses
from pydantic import BaseModel, ValidationError

from keepwarm import config
from keepwarm.errors import BadField
from keepwarm.prefix.policy import Policy
from keepwarm.server.anthropic import request as messages_request
from keepwarm.server.anthropic.shapes import MessagesRequest
from keepwarm.server.http.problems import validation_problem
from keepwarm.server.http.request_fields import RequestFields
from keepwarm.server.ollama import request as ollama_request
from keepwarm.server.ollama.shapes import OllamaChatRequest
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest
from keepwarm.server.responses import request as responses_request
from keepwarm.server.responses.shapes import ResponsesRequest
from keepwarm.text.request import KVOptions, Request

Fields = dict[str, Any]
PLACES = ("here", "there")
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": list(PLACES)}},
    "required": ["place"],
    "additionalProperties": False,
}
HELLO = {"role": "user", "content": "Hello"}
CALLER = RequestFields("t", "me", Policy.READ_WRITE, False, KVOptions(), 60.0)
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
    calls: Sequence[tuple[str, str, Fields]] = ()  # id, name, arguments


class Problem(NamedTuple):
    message: str
    kind: str | None  # None: the API has none


class Api:
    """One API: bodies for a question, and how its answers are read."""

    name: ClassVar[str]
    path: ClassVar[str]
    answer: ClassVar[type[BaseModel]]  # of the official client
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
        """A question; `stop`, `schema` and `tool` as this API takes them."""
        raise NotImplementedError

    def follow_up(self, text: str, answer: Fields, result: str) -> Fields:
        """The question, the call in the answer to it, and the result of that call."""
        raise NotImplementedError

    def read(self, answer: Fields) -> ReadAnswer:
        raise NotImplementedError

    def whole(self, stream: str) -> Fields:
        """The answer that the events of a stream amount to."""
        raise NotImplementedError

    def problem(self, error: Fields) -> Problem:
        assert error["error"].keys() == {"message", "type", "param", "code"}
        return Problem(error["error"]["message"], error["error"]["type"])

    def failed(self, stream: str) -> str:
        """The message of a stream that ended with an error."""
        return self.problem(events_of(stream)[-1]).message


def events_of(stream: str) -> list[Fields]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


class ChatApi(Api):
    name, path = "chat", "/v1/chat/completions"
    answer = openai.types.chat.ChatCompletion
    shape = ChatRequest

    def request_of(self, body: Any, settings: config.Settings) -> Request:
        return chat.request_of(body, CALLER, settings)

    def body(self, text: str, n_tokens: int = 8, **fields: Any) -> Fields:
        body: Fields = {"messages": [{"role": "user", "content": text}], "max_tokens": n_tokens}
        if fields.pop("tool", False):
            body["tools"] = [{"type": "function", "function": FUNCTION}]
            body |= {"tool_choice": "required", "parallel_tool_calls": False}
        if schema := fields.pop("schema", None):
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        if fields.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return body | fields

    def follow_up(self, text: str, answer: Fields, result: str) -> Fields:
        message = answer["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        body = self.body(text, tool=True) | {"tool_choice": "auto"}
        body["messages"] += [message, {"role": "tool", "tool_call_id": call_id, "content": result}]
        return body

    def read(self, answer: Fields) -> ReadAnswer:
        (choice,), usage = answer["choices"], answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        calls = choice["message"].get("tool_calls", ())
        assert (choice["finish_reason"] == "tool_calls") == bool(calls)
        functions = [(call["id"], call["function"]) for call in calls]
        return ReadAnswer(
            choice["message"]["content"] or "",
            choice["finish_reason"] == "length",
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            answer["keepwarm"],
            [(i, each["name"], json.loads(each["arguments"])) for i, each in functions],
        )

    def whole(self, stream: str) -> Fields:
        *chunks, last = events_of(stream)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        message: Fields = {"content": "", "role": "", "tool_calls": []}
        reason = None
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            delta, reason = choice["delta"], choice["finish_reason"]
            for name in ("content", "role"):
                message[name] += delta.get(name, "")
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
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
        *chunks, last = events_of(stream)
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(choice["text"] for choice in choices)
        return last | {"choices": [choices[-1] | {"text": text}]}


class MessagesApi(Api):
    name, path = "messages", "/v1/messages"
    answer = anthropic.types.Message
    shape, least = MessagesRequest, {"messages": [HELLO], "max_tokens": 9}

    def request_of(self, body: Any, settings: config.Settings) -> Request:
        return messages_request.request_of(body, CALLER, settings)

    def body(self, text: str, n_tokens: int = 8, **fields: Any) -> Fields:
        body: Fields = {"messages": [{"role": "user", "content": text}], "max_tokens": n_tokens}
        if fields.pop("tool", False):
            body["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
            body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        if schema := fields.pop("schema", None):
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        if stop := fields.pop("stop", None):
            body["stop_sequences"] = stop
        return body | fields

    def follow_up(self, text: str, answer: Fields, result: str) -> Fields:
        (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        body = self.body(text, tool=True) | {"tool_choice": {"type": "auto"}}
        block = {"type": "tool_result", "tool_use_id": call["id"], "content": result}
        body["messages"] += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [block]},
        ]
        return body

    def read(self, answer: Fields) -> ReadAnswer:
        usage, blocks = answer["usage"], answer["content"]
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        calls = [b for b in blocks if b["type"] == "tool_use"]
        assert (answer["stop_reason"] == "tool_use") == bool(calls)
        return ReadAnswer(
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            answer["stop_reason"] == "max_tokens",
            prompt,
            cached,
            usage["output_tokens"],
            answer["keepwarm"],
            [(call["id"], call["name"], call["input"]) for call in calls],
        )

    def whole(self, stream: str) -> Fields:
        events = events_of(stream)
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
            made["content"][index]["input"] = json.loads(text)
        return made

    def problem(self, error: Fields) -> Problem:
        assert (error["type"], error["error"].keys() >= {"type", "message"}) == ("error", True)
        return Problem(error["error"]["message"], error["error"]["type"])


class ResponsesApi(Api):
    name, path = "responses", "/v1/responses"
    answer = openai.types.responses.Response
    shape, least = ResponsesRequest, {"input": "Hello"}

    def request_of(self, body: Any, settings: config.Settings) -> Request:
        items = responses_request.items_of(body.input)
        return responses_request.request_of(body, items, CALLER, settings)

    def body(self, text: str, n_tokens: int = 8, **fields: Any) -> Fields:
        items = [{"role": "user", "content": text}]
        body: Fields = {"input": items, "max_output_tokens": n_tokens, "store": False}
        if fields.pop("tool", False):
            body["tools"] = [{"type": "function", **FUNCTION}]
            body |= {"tool_choice": "required", "parallel_tool_calls": False}
        if schema := fields.pop("schema", None):
            body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        return body | fields

    def follow_up(self, text: str, answer: Fields, result: str) -> Fields:
        (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
        body = self.body(text, tool=True) | {"tool_choice": "auto"}
        body["input"] += [*answer["output"], output]
        return body

    def read(self, answer: Fields) -> ReadAnswer:
        usage, items = answer["usage"], answer["output"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        is_cut = answer["status"] == "incomplete"
        assert (answer["incomplete_details"] == {"reason": "max_output_tokens"}) == is_cut
        messages = [item for item in items if item["type"] == "message"]
        calls = [item for item in items if item["type"] == "function_call"]
        assert {call["status"] for call in calls} <= {"completed"}
        return ReadAnswer(
            "".join(part["text"] for message in messages for part in message["content"]),
            is_cut,
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
            answer["keepwarm"],
            [(call["call_id"], call["name"], json.loads(call["arguments"])) for call in calls],
        )

    def whole(self, stream: str) -> Fields:
        events = events_of(stream)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
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
    answer = ollama.ChatResponse
    shape, least = OllamaChatRequest, {"model": "m", "messages": [HELLO]}

    def request_of(self, body: Any, settings: config.Settings) -> Request:
        return ollama_request.chat_request(body, body.messages, CALLER, settings)

    def body(self, text: str, n_tokens: int = 8, **fields: Any) -> Fields:
        options = {"num_predict": n_tokens, "temperature": 0}
        if stop := fields.pop("stop", None):
            options["stop"] = stop
        if fields.pop("tool", False):  # none can be forced
            fields["tools"] = [{"type": "function", "function": FUNCTION}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        format_ = {"format": schema} if (schema := fields.pop("schema", None)) else {}
        return {**body, "options": options, "stream": False, "truncate": False, **format_} | fields

    def read(self, answer: Fields) -> ReadAnswer:
        assert answer["done"]
        return ReadAnswer(
            answer["message"]["content"],
            answer["done_reason"] == "length",
            answer["prompt_eval_count"],
            None,
            answer["eval_count"],
            answer["keepwarm"],
        )

    def whole(self, stream: str) -> Fields:
        *parts, last = map(json.loads, stream.splitlines())
        assert not any(part["done"] for part in parts)
        text = "".join(part["message"]["content"] for part in parts)
        return last | {"message": last["message"] | {"content": text}}

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
STOPPING = (CHAT, TEXT, MESSAGES, OLLAMA)  # at the client's own strings


def headers(key: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {key}"}
