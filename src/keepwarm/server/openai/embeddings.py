"""OpenAI's JSON of embeddings: the request, and the response as one list of vectors."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from typing import Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from keepwarm.server.embedding import EmbeddingAnswer, Embeddings, shortened
from keepwarm.server.http.body import JsonInput
from keepwarm.server.http.receipts import ReceiptOut, receipt_dict, receipt_headers
from keepwarm.server.http.request_fields import KeepwarmOptions
from keepwarm.server.http.sse import cancel_on_disconnect
from keepwarm.server.openai.shapes import Prompts
from keepwarm.text.request import Vector


class EmbeddingRequest(JsonInput):
    input: Prompts
    model: str | None = Field(default=None, description="As in chat completions.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: little-endian floats of 32 bits."
    )
    dimensions: int | None = Field(
        default=None, ge=1, description="Keep this many numbers and scale to length 1 again."
    )
    prompt_name: str | None = Field(
        default=None, description="One of the model's own prompts, put before each text."
    )
    keepwarm: KeepwarmOptions | None = None


class EmbeddingOut(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingOut]
    model: str
    usage: EmbeddingUsage
    keepwarm: ReceiptOut


class WholeEmbeddings(Response):
    """Waits for all vectors and sends them; many numbers are written off the event loop."""

    def __init__(
        self, answer: EmbeddingAnswer, build: Callable[[Embeddings], Mapping[str, Any]]
    ) -> None:
        super().__init__()
        self._answer = answer
        self._build = build

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(self._answer, receive):
            found = await self._answer.wait()
        response = await asyncio.to_thread(self._response, found)
        await response(scope, receive, send)

    def _response(self, found: Embeddings) -> Response:
        return JSONResponse(self._build(found), headers=receipt_headers(found.receipt))


def embedding_list(body: EmbeddingRequest, model: str, found: Embeddings) -> EmbeddingList:
    as_text = body.encoding_format == "base64"
    vectors = [shortened(vector, body.dimensions) for vector in found.vectors]
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(vector) if as_text else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens},
        "keepwarm": receipt_dict(found.receipt),
    }


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
