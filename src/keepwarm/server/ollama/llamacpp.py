"""What clients of llama.cpp's server ask for besides OpenAI's API: tokens, properties, slots.

`/tokenize` and `/detokenize` are vLLM's too, which names their fields otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from typing_extensions import TypedDict

from keepwarm import __version__
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadField
from keepwarm.prefix.blocks import common_prefix
from keepwarm.server.http.body import Checked, JsonInput, api_router
from keepwarm.server.http.request_fields import Config, InTurn, Served
from keepwarm.server.http.viewer import CurrentViewer
from keepwarm.server.openai.shapes import OpenAIErrorOut, SamplingOut
from keepwarm.server.openai.tokens import Pieces
from keepwarm.telemetry.ledger import RequestRecord
from keepwarm.text import request as engine_request
from keepwarm.text.detokenize import decode
from keepwarm.text.sandbox.deadline import PrepareDeadline

router = api_router(
    tags=["llama.cpp"],
    responses={
        "4XX": {"model": OpenAIErrorOut, "description": "The request is invalid or refused."},
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed or is shutting down."},
    },
)


class TokenizeRequest(JsonInput):
    content: str | None = None
    prompt: str | None = Field(default=None, description="`content`, as vLLM names it.")
    add_special: bool = Field(default=False, description="With the token that begins a text.")
    add_special_tokens: bool = Field(default=True, description="The same, beside `prompt`.")
    with_pieces: bool = Field(default=False, description="With the text of each token.")
    return_token_strs: bool = Field(default=False, description="With the name of each token.")
    model: str | None = None

    def text(self) -> tuple[str, bool]:
        """The text, and whether the token that begins one is wanted."""
        if self.content is not None and self.prompt is None:
            return self.content, self.add_special
        if self.prompt is not None and self.content is None:
            return self.prompt, self.add_special_tokens
        raise BadField("/tokenize needs either content or prompt; send one of them.", "content")


class DetokenizeRequest(JsonInput):
    tokens: Checked[int]
    model: str | None = None


class TokenPiece(TypedDict):
    id: int
    piece: str


class TokensOut(TypedDict):
    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int  # the context
    token_strs: list[str] | None


class ContentOut(TypedDict):
    content: str
    prompt: str  # the same


class GenerationSettings(TypedDict):
    n_ctx: int
    params: SamplingOut


class Modalities(TypedDict):
    vision: bool
    audio: bool


class PropsOut(TypedDict):
    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str  # the name again: where files lie is nobody's business
    chat_template: str
    modalities: Modalities
    build_info: str


class NextToken(TypedDict):
    n_decoded: int
    has_next_token: bool


class SlotOut(TypedDict):
    """A request that waits or runs: counts only, no text."""

    id: int
    id_task: int
    n_ctx: int
    is_processing: bool
    n_prompt_tokens: int
    n_prompt_tokens_processed: int
    n_prompt_tokens_cache: int
    next_token: list[NextToken]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, models: Served, turn: InTurn) -> TokensOut:
    """The tokens of a text; special tokens in it are read as such, if raw prompts' are."""
    host = await models.use(body.model, turn)
    model, (text, add_special) = host.engine.model, body.text()
    tokens = await turn.run(_tokens, host.engine, text, add_special)
    named: list[TokenPiece] | None = None
    if body.with_pieces:
        pieces = Pieces(model.tokenizer)
        named = await turn.build(lambda: [{"id": t, "piece": pieces.of(t).text} for t in tokens])
    names = model.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {
        "tokens": tokens if named is None else named,
        "count": len(tokens),
        "max_model_len": model.n_context,
        "token_strs": names,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, models: Served, turn: InTurn) -> ContentOut:
    """The text of some tokens."""
    host = await models.use(body.model, turn)
    text = await turn.run(_text, host.engine, body.tokens)
    return {"content": text, "prompt": text}


@router.get("/props")
async def props(models: Served, settings: Config, model: str | None = None) -> PropsOut:
    """The model's context, template and defaults."""
    async with models.using(model) as host:
        engine = host.engine
        template = engine.model.tokenizer.chat_template
        return {
            "default_generation_settings": {
                "n_ctx": engine.model.n_context,
                "params": engine.sampling._asdict(),  # type: ignore[typeddict-item]
            },
            "total_slots": settings.max_concurrency,
            "model_alias": host.name,
            "model_path": host.name,
            "chat_template": template if isinstance(template, str) else "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"keepwarm-{__version__}",
        }


@router.get("/slots")
async def slots(models: Served, viewer: CurrentViewer) -> list[SlotOut]:
    """The caller's requests that wait or run. Where keys share a cache nobody's owner is known."""
    if not viewer.may_read_texts:
        return []
    found = [
        (entry, engine.model.n_context)
        for engine in models.engines
        for entry in engine.running()
        if entry.tenant == viewer.tenant
    ]
    return [_slot(i, entry, n_context) for i, (entry, n_context) in enumerate(found)]


def _slot(index: int, entry: RequestRecord, n_context: int) -> SlotOut:
    cached = entry.receipt.cached_tokens if entry.receipt else 0
    return {
        "id": index,
        "id_task": entry.number,
        "n_ctx": n_context,
        "is_processing": entry.state != "waiting",
        "n_prompt_tokens": entry.prompt_tokens,
        "n_prompt_tokens_processed": entry.computed_tokens,
        "n_prompt_tokens_cache": cached,
        "next_token": [{"n_decoded": entry.answer_tokens, "has_next_token": True}],
    }


def _tokens(engine: Engine, text: str, add_special: bool, deadline: PrepareDeadline) -> list[int]:
    tokens = engine.preparer.tokens(engine_request.Request(prompt=text), None, deadline)
    first = 0 if add_special else common_prefix(tokens, engine.model.tokenizer.encode(""))
    return list(tokens[first:])


def _text(engine: Engine, tokens: Sequence[int], deadline: PrepareDeadline) -> str:
    asked = engine_request.Request(prompt=tokens)
    return decode(engine.model.tokenizer, engine.preparer.tokens(asked, None, deadline))
