"""Fields of the published schemas: honoured, refused, or named in the receipt; none is silent."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import ollama._types as ollama
import pytest
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import EmbeddingCreateParams
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
from pydantic import BaseModel
from typing_extensions import is_typeddict

from keepwarm.server.anthropic.request import MessagesRequest
from keepwarm.server.http.body import IGNORED, MAX_IGNORED, ignored_fields
from keepwarm.server.ollama.request import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest, EmbeddingRequest
from keepwarm.server.responses.request import ResponsesRequest

SERVER = Path(__file__).parents[2] / "src" / "keepwarm" / "server"
SAID = [{"role": "user", "content": "How many leaves has the oak?"}]
CHAT = {"messages": SAID, "max_tokens": 1}
TEXT = {"prompt": "The oak", "max_tokens": 1}
RESPONSE = {"input": SAID, "max_output_tokens": 1, "store": False}
NAMED = {"model": "tiny", "options": {"num_predict": 1}}
SCHEMAS = {
    "/v1/chat/completions": (ChatRequest, CHAT, chat.CompletionCreateParamsBase),
    "/v1/completions": (CompletionRequest, TEXT, completions.CompletionCreateParamsBase),
    "/v1/embeddings": (EmbeddingRequest, {"input": "The oak"}, EmbeddingCreateParams),
    "/v1/responses": (ResponsesRequest, RESPONSE, responses.ResponseCreateParamsBase),
    "/v1/messages": (MessagesRequest, CHAT, messages.MessageCreateParamsBase),
    "/v1/messages?beta=true": (MessagesRequest, CHAT, beta_messages.MessageCreateParamsBase),
    "/api/chat": (OllamaChatRequest, {**NAMED, "messages": SAID}, ollama.ChatRequest),
    "/api/generate": (OllamaGenerateRequest, {**NAMED, "prompt": "Oak"}, ollama.GenerateRequest),
    "/api/embed": (OllamaEmbedRequest, {"model": "tiny", "input": "Oak"}, ollama.EmbedRequest),
}
# Objects in a request that hold options, with values that make them valid.
OPTIONS = {
    ("options",): {},
    ("text",): {},
    ("text", "format"): {"type": "text"},
    ("reasoning",): {},
    ("stream_options",): {},
    ("response_format",): {"type": "text"},
    ("response_format", "json_schema"): {"name": "tree", "schema": {"type": "object"}},
    ("thinking",): {"type": "disabled"},
    ("output_config",): {},
    ("output_config", "format"): {"type": "json_schema", "schema": {"type": "object"}},
    ("cache_control",): {"type": "ephemeral"},
    ("metadata",): {},
    ("tool_choice",): {"type": "auto"},
}
DUMPED = {"KVOptionsIn"}  # read as a whole
HELD = {"ContentBlock.signature"}  # of our making; it comes back

every_api = pytest.mark.parametrize("path", SCHEMAS)


def objects(annotation: Any) -> Iterator[Any]:
    """The objects among what a field may be: typed dictionaries, of Ollama's client models."""
    if is_typeddict(annotation) or hasattr(annotation, "model_fields"):
        yield annotation
    elif get_origin(annotation) not in (list, dict):
        for inner in get_args(annotation):
            yield from objects(inner)


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models(inner)


def heeded(model: type[BaseModel]) -> dict[str, Any]:
    return {
        field.alias or name: field.annotation
        for name, field in model.model_fields.items()
        if IGNORED not in field.metadata
    }


def fields_of(published: Any) -> dict[str, Any]:
    if is_typeddict(published):
        return get_type_hints(published)
    return {name: field.annotation for name, field in published.model_fields.items()}


def ignored_in(published: Any, model: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[Any]:
    """The fields of a published type that our model does not have, in options as well."""
    known = heeded(model)
    for name, annotation in fields_of(published).items():
        where = (*at, name)
        if name not in known:
            yield where
        elif where in OPTIONS:
            for inner in objects(annotation):
                for of in models(known[name]):
                    yield from ignored_in(inner, of, where)


def body_with(base: dict[str, Any], where: tuple[str, ...]) -> dict[str, Any]:
    """A body that has this field, and the objects around it."""
    body = inner = json.loads(json.dumps(base))
    for depth in range(1, len(where)):
        inner = inner.setdefault(where[depth - 1], dict(OPTIONS[where[:depth]]))
    inner[where[-1]] = "given"
    return body


def missing(path: str) -> list[tuple[str, ...]]:
    model, _, published = SCHEMAS[path]
    return sorted(set(ignored_in(published, model)))


@every_api
def test_every_published_field_that_is_not_read_is_named(path):
    model, base, _ = SCHEMAS[path]
    for where in missing(path):
        body = body_with(base, where)
        try:
            read = model.model_validate(body)
        except ValueError:  # refused, as the type of a field that is checked
            continue
        assert ".".join(where) in ignored_fields(read, body)


@every_api
@pytest.mark.parametrize("stream", [False, True])
def test_the_receipt_names_them(live, path, stream):
    """All at once; the wrong ones are refused elsewhere."""
    model, base, _ = SCHEMAS[path]
    body = json.loads(json.dumps(base))
    if "stream" in model.model_fields:
        body["stream"] = stream
    given = [where for where in missing(path) if len(where) == 1][:MAX_IGNORED]
    accepted = []
    for (name,) in given:
        try:
            model.model_validate(body | {name: "given"})
        except ValueError:
            continue
        body[name] = "given"
        accepted.append(name)
    answer = live.post(path, body)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.headers["x-keepwarm-receipt"]).get("ignored_fields", []) == accepted
    assert all(f'"{name}"' in answer.text for name in accepted)


def test_verbosity_is_named(live):
    body = RESPONSE | {"text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}}
    receipt = live.post("/v1/responses", body).json()["keepwarm"]
    assert receipt["ignored_fields"] == ["reasoning.summary", "text.verbosity"]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, ["stream_options"]),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, ["stream_options"]),
        ("/v1/chat/completions", {"stream_options": {"include_usage": False}}, []),
        (
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"include_usage": True}},
            [],
        ),
        ("/v1/chat/completions", {"cache_salt": "s"}, ["cache_salt"]),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "text", "schema": {"type": "object"}}},
            ["response_format.schema"],
        ),
        ("/v1/responses", {"include": ["file_search_call.results"]}, ["include"]),
        (
            "/v1/responses",
            {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]},
            [],
        ),
        (
            "/api/chat",
            {"options": {"num_ctx": 9, "wings": {"n": 2}, "use_mmap": None, "repeat_last_n": 64}},
            ["options.num_ctx", "options.repeat_last_n", "options.wings"],
        ),
        ("/api/chat", {"options": {"repeat_last_n": -1}}, []),
    ],
)
def test_what_has_no_effect_beside_the_rest_is_named(path, fields, named):
    model, base, _ = SCHEMAS[path]
    body = base | fields
    assert list(ignored_fields(model.model_validate(body), body)) == named


@pytest.mark.parametrize("path", [path for path in SCHEMAS if "embed" not in path])
@pytest.mark.parametrize(
    ("field", "asks", "idle"),
    [
        ("stop_token_ids", [7], []),
        ("min_tokens", 5, 0),
        ("bad_words", ["no"], None),
        ("chat_template", "{{ messages }}", ""),
        ("documents", [{"text": "An oak."}], []),
        ("modalities", ["text", "audio"], ["text"]),
    ],
)
def test_what_would_change_the_answer_and_cannot_be_done_is_refused(path, field, asks, idle):
    model, base, _ = SCHEMAS[path]
    with pytest.raises(ValueError, match="would change the answer"):
        model.model_validate(base | {field: asks})
    model.model_validate(base | {field: idle})


def test_synonyms_are_read():
    body = {**CHAT, "stop_sequences": ["a"], "repeat_penalty": 2, "n_predict": 3, "think": False}
    assert ignored_fields(ChatRequest.model_validate(body), body) == ()


def test_false_is_named_too():
    """It switches something off that is on, or cannot be."""
    body = {**CHAT, "store": False, "reasoning": {"enabled": False}, "logprobs": False}
    named = ignored_fields(ChatRequest.model_validate(body), body)
    assert named == ("reasoning.enabled", "store")


def test_lists_are_looked_into_and_null_asks_for_nothing():
    tool = {"type": "function", "function": {"name": "look", "strict": True, "cost": 1}}
    said = [SAID[0], {**SAID[0], "audio": None, "weight": 0}, {**SAID[0], "annotations": []}]
    body = {"messages": said, "tools": [tool], "store": None}
    assert ignored_fields(ChatRequest.model_validate(body), body) == (
        "messages[].weight",
        "tools[].function.cost",
    )


def test_an_image_is_unread_and_not_ignored_too():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}, "detail": "low"}
    text = {"type": "text", "text": "What is this?", "detail": "low"}
    body = {"messages": [{"role": "user", "content": [image, text]}]}
    assert ignored_fields(ChatRequest.model_validate(body), body) == (
        "messages[].content[].detail",
    )


def test_names_are_few_and_plain():
    """They come back in a header: what is no name is not repeated."""
    body = CHAT | {f"field_{i}": 1 for i in range(99)}
    assert len(ignored_fields(ChatRequest.model_validate(body), body)) == MAX_IGNORED
    body = CHAT | {"a\r\nset-cookie: b": 1, "x" * 999: 1}
    assert ignored_fields(ChatRequest.model_validate(body), body) == ("?",)


def test_every_field_of_our_models_is_read():
    """What a model has and no code reads would be silent: it must be marked as ignored."""
    trees = [ast.parse(path.read_text()) for path in SERVER.rglob("*.py")]
    read = {
        node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    found: set[type[BaseModel]] = set()
    waiting = [model for model, _, _ in SCHEMAS.values()]
    waiting += [OllamaShowRequest, OllamaPullRequest]
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.add(model)
            waiting += [
                each for field in model.model_fields.values() for each in models(field.annotation)
            ]
    silent = {
        f"{model.__name__}.{name}"
        for model in found
        for name, field in model.model_fields.items()
        if name not in read and IGNORED not in field.metadata and model.__name__ not in DUMPED
    }
    assert silent == HELD
