"""Vectors of texts, for every API that has them: `embed`, then `EmbeddingAnswer.wait`.

Each input is a request to the engine, a few at a time, so that answers that run go on and other
keys have their turns. Only what all inputs begin with is kept in the cache: an instruction is
worth it, the texts of an index are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from keepwarm.errors import BadField, Cancelled, ContextTooLong, EngineFailed
from keepwarm.prefix.blocks import common_prefix
from keepwarm.prefix.policy import Policy
from keepwarm.server.http.permits import PrepareSlot
from keepwarm.server.http.sse import cancel_on_disconnect, receipt_headers, resumed
from keepwarm.server.models.host import EngineHost, ObservedAnswer
from keepwarm.text.detokenize import decode
from keepwarm.text.request import Receipt, Request, Result, Sampling, Vector

if TYPE_CHECKING:
    from keepwarm.engine.engine import Engine
    from keepwarm.telemetry.ledger import RequestRecord
    from keepwarm.text.prepare import PreparedRequest
    from keepwarm.text.sandbox.deadline import PrepareDeadline

TextOrTokens: TypeAlias = str | Sequence[int]

MAX_INPUTS = 2_048
MAX_TOKENS = 300_000  # of all inputs together
AT_ONCE = 8  # inputs that the engine has at a time
MARGIN = 8  # tokens that a shortened text is shorter than need be
SMALLEST = 1e-12  # length of a vector
MIN_SHARED = 16  # tokens that all inputs begin with, to be worth keeping


class Embeddings(NamedTuple):
    vectors: list[Vector]  # of length 1, in the order of the inputs
    n_tokens: int  # of all inputs
    receipt: Receipt


class EmbeddingPlan(NamedTuple):
    """Inputs as the engine takes them, and what they all begin with, if it is to be kept."""

    inputs: Sequence[PreparedRequest]
    shared: PreparedRequest | None


async def embed(
    host: EngineHost,
    inputs: Sequence[TextOrTokens],
    fields: Request,
    slot: PrepareSlot,
    *,
    prompt_name: str | None = None,
    truncate: bool = False,
) -> EmbeddingAnswer:
    """Prepare all inputs, which ends the slot; a bad one is refused here.

    `prompt_name` is one of the model's own prompts, `truncate` shortens inputs to its context.
    """
    if not 0 < len(inputs) <= MAX_INPUTS:
        raise BadField(f"There are {len(inputs):,} inputs; send 1 to {MAX_INPUTS:,}.", "input")
    work = _Preparing(host.engine, fields, truncate)
    answer = EmbeddingAnswer(host, await slot.run(work.plan, inputs, prompt_name), slot)
    slot.end()
    slot.answers = [answer]
    return answer


class _Preparing(NamedTuple):
    engine: Engine
    fields: Request
    truncate: bool

    def plan(
        self, inputs: Sequence[TextOrTokens], prompt_name: str | None, deadline: PrepareDeadline
    ) -> EmbeddingPlan:
        model = self.engine.model
        model.embedder.check()
        _ = model.backbone  # says if there is none
        prompt, prepared, n_tokens = model.embedder.prompt(prompt_name), [], 0
        for each in inputs:
            text = prompt + each if isinstance(each, str) else each
            prepared.append(self._prepare(text, deadline))
            n_tokens += len(prepared[-1].tokens)
            if n_tokens > MAX_TOKENS:
                raise BadField(
                    f"The inputs have more than {MAX_TOKENS:,} tokens together; send fewer at a "
                    "time.",
                    "input",
                )
        return EmbeddingPlan(prepared, self._shared([each.tokens for each in prepared]))

    def _prepare(self, text: TextOrTokens, deadline: PrepareDeadline) -> PreparedRequest:
        policy = Policy.READ_ONLY if self.fields.policy.reads else Policy.NO_STORE
        try:
            return self.engine.prepare(self._request(text, policy), deadline)
        except ContextTooLong:
            if not self.truncate:
                raise
            return self.engine.prepare(self._request(self._shortened(text), policy), deadline)

    def _shortened(self, text: TextOrTokens) -> TextOrTokens:
        """The beginning of a text that is too long; the tokenizer may add a few tokens to it."""
        tokenizer, n_most = self.engine.model.tokenizer, self.engine.model.n_context - 1
        if not isinstance(text, str):
            return text[:n_most]
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return decode(tokenizer, tokens[: max(1, n_most - MARGIN)])

    def _shared(self, inputs: Sequence[Sequence[int]]) -> PreparedRequest | None:
        """What several inputs begin with; every two are compared only with the first."""
        first, *others = inputs
        n_shared = min((common_prefix(first, other) for other in others), default=0)
        policy = self.fields.policy
        if n_shared < MIN_SHARED or not policy.writes:
            return None
        return self.engine.prepare(self._request(list(first[:n_shared]), policy))

    def _request(self, prompt: TextOrTokens, policy: Policy) -> Request:
        """Not with the server's KV options: vectors of an index are compared for years."""
        return Request(
            prompt=prompt,
            embed=True,
            exact=True,
            sampling=Sampling(max_tokens=0),
            policy=policy,
            tenant=self.fields.tenant,
            caller=self.fields.caller,
            timeout_s=self.fields.timeout_s,
            request_id=self.fields.request_id,
            ignored_fields=self.fields.ignored_fields,
        )


class EmbeddingAnswer:
    """The vectors of all inputs, once they are computed; `wait` has that done."""

    def __init__(self, host: EngineHost, plan: EmbeddingPlan, slot: PrepareSlot) -> None:
        self._host = host
        self._slot = slot
        self._plan = plan
        self._begun: list[ObservedAnswer] = []
        self._is_cancelled = False

    @property
    def model(self) -> str:
        return self._host.name

    @property
    def records(self) -> list[RequestRecord | None]:
        return [record for answer in self._begun for record in answer.records]

    def cancel(self) -> None:
        """No more inputs are begun, and those that run stop."""
        self._is_cancelled = True
        for answer in self._begun:
            answer.cancel()

    async def wait(self) -> Embeddings:
        from keepwarm.engine.answer import sum_receipts  # loads MLX

        inputs, shared = self._plan
        first = await self._run([shared]) if shared else []
        found: list[Result] = []
        for start in range(0, len(inputs), AT_ONCE):
            found += await self._run(inputs[start : start + AT_ONCE])
        receipt = sum_receipts([each.receipt for each in found])
        n_computed = sum(each.receipt.recomputed for each in first)
        vectors = [each.vector for each in found if each.vector is not None]
        if len(vectors) < len(inputs):
            raise EngineFailed("A vector is missing; retry.")
        return Embeddings(vectors, receipt.prompt_tokens, _with_shared(receipt, n_computed))

    async def _run(self, requests: Sequence[PreparedRequest]) -> list[Result]:
        if self._is_cancelled:
            raise Cancelled("The request was cancelled.")
        running = await self._host.run(requests, self._slot)
        self._begun += running
        if self._is_cancelled:
            self.cancel()  # meanwhile; they had not begun
        return list(await asyncio.gather(*(answer.wait() for answer in running)))


def _with_shared(receipt: Receipt, n_computed: int) -> Receipt:
    """What was computed of the shared beginning was computed, though each input found it."""
    reused, n_left = dict(receipt.reused), n_computed
    for tier in receipt.reused:
        n_moved = min(n_left, reused[tier])
        reused[tier] -= n_moved
        n_left -= n_moved
    moved = n_computed - n_left
    kept = {tier: n_tokens for tier, n_tokens in reused.items() if n_tokens}
    return replace(receipt, reused=kept, recomputed=receipt.recomputed + moved)


def shortened(vector: Vector, dimensions: int | None) -> Vector:
    """Its first numbers, again of length 1."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise BadField(
            f"dimensions is {dimensions}, but the model's vectors have {len(vector)}; ask for at "
            "most that many.",
            "dimensions",
        )
    first: Vector = vector[:dimensions]
    scaled: Vector = first / max(float(first @ first) ** 0.5, SMALLEST)
    return scaled


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
        response = await resumed(scope, self._response, found)
        await response(scope, receive, send)

    def _response(self, found: Embeddings) -> Response:
        return JSONResponse(
            self._build(found), headers=receipt_headers(found.receipt, model=self._answer.model)
        )
