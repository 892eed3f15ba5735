"""A request made ready to run, on the caller's thread.

resolve options, agent and lane → the history that it continues → render and tokenise → ask the
shared tiers what they hold of it. Nothing here runs on the engine's thread but `call`s.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.lane import Lane, Lanes, exact_options, make_options
from keepwarm.engine.recorder import Recorder
from keepwarm.errors import BadInput, UnknownAgent
from keepwarm.kv import make_caches
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, chain, pack, root, unpack
from keepwarm.records.record import ReadBuffer, RecordView
from keepwarm.store.tier import BlockInfo
from keepwarm.store.tiers import Tiers
from keepwarm.text.continuing import with_kept_options
from keepwarm.text.past_answers import KnownSpan, StoredAnswers
from keepwarm.text.prepare import PreparedRequest, Preparer
from keepwarm.text.request import KnownHistory, Request
from keepwarm.text.sampling_rules import DrawRules
from keepwarm.text.sandbox.deadline import PrepareDeadline

AnyRequest: TypeAlias = Request | PreparedRequest
MAX_TOLD = 1 << 24  # bytes of the answers that another machine tells


class ReadyRequest(NamedTuple):
    """A request as the scheduler takes it."""

    prepared: PreparedRequest
    lane: Lane  # that it runs in
    generation: int  # of the store on arrival; what is deleted later is not kept


class Preparation:
    """Prepares the requests of one engine. Thread-safe; never on the engine's thread."""

    def __init__(
        self,
        config: EngineConfig,
        sampling: DrawRules,
        lanes: Lanes,
        preparer: Preparer,
        recorder: Recorder,
    ) -> None:
        """`sampling` holds where a request is silent."""
        self._config = config
        self._sampling = sampling
        self._lanes = lanes
        self._store = lanes.store
        self._preparer = preparer
        self._recorder = recorder

    def make_ready(self, request: AnyRequest, deadline: PrepareDeadline | None) -> ReadyRequest:
        """Prepare a request that will run."""
        generation = self._store.catch_up()
        prepared, lane = self.prepare(request, deadline)
        if lane.gate is not None and prepared.request.speculation:
            prepared = self._preparer.with_rewritten(prepared)
        lane = lane.look_up(prepared.tokens, prepared.request.policy)
        lane.restorer.ask(prepared.tokens, prepared.request.policy)
        return ReadyRequest(prepared, lane, generation)

    def prepare(
        self, request: AnyRequest, deadline: PrepareDeadline | None
    ) -> tuple[PreparedRequest, Lane]:
        """A request as tokens, and the lane that it runs in. Changes nothing."""
        if isinstance(request, PreparedRequest):
            lane = self.lane_for(request.request)
            return request, lane.for_prompt(len(request.tokens))
        request, lane = self.resolve(request, deadline)
        found = self._preparer.prepare(request, _stored_answers(lane), deadline, lane.needs_cuts)
        return found, lane.for_prompt(len(found.tokens))

    def count_tokens(self, request: Request, deadline: PrepareDeadline | None) -> int:
        """Tokens of a prompt, also of one that is too long for the model."""
        request, lane = self.resolve(request, deadline)
        return self._preparer.n_tokens(request, _stored_answers(lane), deadline)

    def resolve(
        self, request: Request, deadline: PrepareDeadline | None = None
    ) -> tuple[Request, Lane]:
        """A request with all its options and the conversation that it continues; its lane."""
        request = self._config.complete(request, self._sampling)
        make_caches(self._lanes.model.module, **make_options(request.kv))  # refuses bad options
        request = replace(request, policy=self._store.policy_for(request.agent, request.policy))
        lane = self.lane_for(request)
        if request.continues and request.history is None:
            request = replace(request, history=self._history(request, lane, deadline))
        return with_kept_options(request), lane

    def lane_for(self, request: Request) -> Lane:
        """The lane of a request's KV options, tenant and agent."""
        options = exact_options(request.kv) if request.kv.kv_bits is None else request.kv
        lane = self._lanes.get(options, request.tenant)
        return self._lanes.of_agent(lane, request.agent)

    def _history(
        self, request: Request, lane: Lane, deadline: PrepareDeadline | None
    ) -> KnownHistory:
        """What the store has of the conversation, its latest turn included."""
        self._lanes.call(lambda: None).result()  # answers are sent before they are kept
        if request.agent is None or (request.messages is None and request.prompt is None):
            raise BadInput("To continue, a request needs an agent, and messages or a prompt.")
        self._recorder.wait_until_recorded(request.agent, deadline or PrepareDeadline())
        latest = self._store.on_disk.latest_turn(request.agent)
        if latest.namespace not in lane.namespaces and not latest.is_empty:
            raise UnknownAgent(
                f"There is no agent {request.agent!r} with this model and these KV options; use "
                "those it was made with."
            )
        return KnownHistory(latest.tokens, latest.turn)


def _stored_answers(lane: Lane) -> StoredAnswers:
    """In blocks of this machine; what others have told, a few kB, not their blocks."""
    restorer, uploader = lane.restorer, lane.restorer.uploader
    follow = partial(stored_continuations, restorer.namespace, restorer.tiers.local)

    def elsewhere(texts: Sequence[str]) -> list[list[KnownSpan]]:
        tiers = restorer.tiers.shared
        told = (one for tier in tiers for one in tier.answers_to(restorer.namespace, texts))
        return [spans for one in told if (spans := _decode_spans(one))]

    def share(
        text: str,
        spans: Sequence[KnownSpan],
        tokens: Sequence[int],
        is_wanted: Callable[[], bool],
    ) -> Future[None] | None:
        if uploader is None:
            return None
        encode = partial(_encode_spans, spans)
        return uploader.tell(restorer.namespace, text, encode, tokens, is_wanted)

    return StoredAnswers(follow, elsewhere, share)


def _encode_spans(spans: Sequence[KnownSpan]) -> bytes:
    return zlib.compress(json.dumps([(a, b, list(ids)) for a, b, ids in spans]).encode(), 1)


def _decode_spans(told: bytes) -> list[KnownSpan]:
    """Empty if it is something else: a stranger may have written it."""
    try:
        spans = json.loads(zlib.decompressobj().decompress(told, MAX_TOLD))
        return [KnownSpan(int(a), int(b), array("I", ids)) for a, b, ids in spans]
    except (ValueError, TypeError, OverflowError, RecursionError, zlib.error):
        return []


def stored_continuations(
    namespace: Namespace,
    tiers: Tiers,
    tokens: Sequence[int],
    guesses: Sequence[Sequence[int]],
) -> Iterator[list[int]]:
    """Stored tokens that follow these, up to the end of the block, most similar to a guess first.

    Reads headers, no tensors, and yields only a few of many. Blocks are found by their first
    tokens: at the start of a block only those that begin like one of the guesses are found.
    """
    whole = [ref.key for ref in chain(namespace, tokens) if ref.n_tokens == BLOCK_TOKENS]
    parent = whole[-1] if whole else root(namespace)
    open_tokens = pack(tokens[len(whole) * BLOCK_TOKENS :])
    starts = [
        open_tokens + pack(guess[:BLOCK_TOKENS]) for guess in guesses[: 1 if open_tokens else None]
    ]
    children = (tiers.children(parent, start[: 4 * BLOCK_TOKENS]) for start in starts)
    found = list(dict.fromkeys(child.key for some in children for child in some))
    known = tiers.have(found)
    for key in found:
        held = _block_tokens(tiers, key, known[key]) if key in known else b""
        if held.startswith(open_tokens) and len(held) > len(open_tokens):
            yield unpack(held[len(open_tokens) :])


def _block_tokens(tiers: Tiers, key: BlockKey, known: BlockInfo) -> bytes:
    """The token ids of a block from its header; empty if it can no longer be read."""
    tokens: list[bytes] = []

    def keep_tokens(record: RecordView) -> None:
        tokens.append(record.header.tokens)

    tiers.visit(key, min(known.parts), keep_tokens, ReadBuffer())
    return tokens[0] if tokens else b""
