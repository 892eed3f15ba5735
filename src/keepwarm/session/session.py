"""A conversation for library users: its messages, its tools, one turn at a time.

session = keepwarm.Session(engine, system="You answer in one sentence.")
print(session.respond("What is a fox?").text)
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

from keepwarm.engine.answer import collect
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput, Stopping, UnknownAgent
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.turn import KeptTurn
from keepwarm.session.compaction import Compacted, Compaction, before_question
from keepwarm.session.gate import Gate, Rule
from keepwarm.session.tool_rounds import (
    Function,
    Question,
    RepeatRule,
    Reply,
    SessionTurn,
    Toolbox,
)
from keepwarm.text.prepare import PreparedRequest
from keepwarm.text.request import (
    Delta,
    Event,
    Format,
    KnownHistory,
    KVOptions,
    Message,
    Receipt,
    Request,
    Result,
    Sampling,
    Tool,
    ToolCalled,
)

StreamEvent: TypeAlias = Delta | ToolCalled


@dataclass(frozen=True)
class KnownConversation:
    """Nothing, for most sessions: then every request has all messages."""

    history: KnownHistory | None = None
    n_messages: int = 0  # of the session, that are in the history

    @classmethod
    def of_agent(cls, engine: Engine, options: Request) -> Self:
        """What the store has of a session's agent."""
        if not engine.store.knows_agent(str(options.agent)):
            return cls()
        try:
            request, _ = engine.resolve(replace(options, messages=(), continues=True))
        except UnknownAgent:  # of another model, or with other KV options
            return cls()
        return cls(request.history)

    def request(self, options: Request, system: str | None, messages: Sequence[Message]) -> Request:
        """A request that has all these messages, or only the new ones."""
        if self.history is None:
            first = [{"role": "system", "content": system}] if system else []
            return replace(options, messages=[*first, *messages])
        new = messages[self.n_messages :]
        return replace(options, messages=new, continues=True, history=self.history)

    def after(
        self, prepared: PreparedRequest | None, result: Result, messages: Sequence[Message]
    ) -> KnownConversation:
        """What is known after an answer, the last of the messages."""
        if self.history is None or prepared is None:
            return self
        (choice, *_), request, past = result.choices, prepared.request, self.history.turn
        turn = past and KeptTurn(
            [*past.messages, *messages[self.n_messages :]],
            *(request.tools, request.thinking, request.template_options),
            verbatim=choice.stop is None,
        )
        tokens = [*prepared.tokens, *(info.token for info in choice.tokens)]
        return KnownConversation(KnownHistory(tokens, turn), len(messages))


class Session:
    """One conversation. Closing it frees its caches in memory; its blocks on disk stay.

    It answers one question at a time. Meanwhile other callers wait (`busy="queue"`) or get Busy
    (`busy="refuse"`). A turn that fails, or is not read to its end, adds no messages.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        tools: Iterable[Tool | Function] = (),
        id: str | None = None,  # noqa: A002
        messages: Sequence[Message] = (),
        sampling: Sampling | None = None,
        kv: KVOptions | None = None,
        thinking: bool | None = None,
        policy: Policy = Policy.READ_WRITE,
        busy: Rule = "queue",
        repeated_calls: RepeatRule = "raise",
    ) -> None:
        """`messages` are those of an earlier session, as `session.messages` returned them.

        Without them a session with the id of an agent in the store continues its conversation.
        `repeated_calls`: what a tool call that repeats the previous round's leads to, an error or
        a reply with the text so far.
        """
        self.engine = engine
        self.id = id or f"session-{secrets.token_hex(6)}"
        self.system = system
        self._toolbox = Toolbox(tools)
        self._repeated_calls = repeated_calls
        self._defaults = Request(
            tools=self._toolbox.schemas,
            sampling=sampling or Sampling(),
            kv=kv or engine.config.kv,
            thinking=thinking,
            policy=policy,
            agent=self.id,
            nameless=id is None,
        )
        self._gate = Gate(busy)
        engine.store.check_agent(self.id)
        self._messages: list[Message] = [dict(message) for message in messages]
        self._known = KnownConversation()
        if id is not None and not messages:
            self._open(KnownConversation.of_agent(engine, self._defaults).history)
        self._turn_ends = _turn_ends(self._messages)  # in messages
        self._finalizer = weakref.finalize(self, _free, engine, self.id)
        self._finalizer.atexit = False

    def _open(self, found: KnownHistory | None) -> None:
        """Continue a conversation; with another system prompt it is rendered anew."""
        kept = list(found.turn.messages) if found and found.turn else []
        first = kept.pop(0)["content"] if kept and kept[0]["role"] == "system" else None
        self._messages = kept
        if found and (found.turn is None or self.system in (None, first)):
            self.system = self.system or first
            self._known = KnownConversation(found, len(kept))

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, without the system prompt."""
        return list(self._messages)

    @property
    def n_turns(self) -> int:
        """Completed turns."""
        return len(self._turn_ends)

    def rewind(self, turn: int) -> None:
        """Drop the turns after this one (0: all of them). The cached prefix stays."""
        with self._gate.hold("refuse"):
            if not 0 <= turn <= self.n_turns:
                raise BadInput(f"The session has {self.n_turns} turns; there is no turn {turn}.")
            if self._known.history is not None and self._known.history.turn is None:
                raise BadInput(
                    "The earlier messages of this session were not kept; rewind its agent in the "
                    "store, and open the session again."
                )
            self._turn_ends = self._turn_ends[:turn]
            self._messages = self._messages[: self._turn_ends[-1] if turn else 0]
            self._known = KnownConversation()
            with suppress(Stopping):
                self.engine.call(lambda: self.engine.live.abandon(self.id)).result()

    def fork(self, id: str | None = None) -> Session:  # noqa: A002
        """Another session with the same messages; their common prefix is not computed again."""
        return self.forks([id])[0]

    def forks(self, ids: int | Sequence[str | None], *, ephemeral: bool = False) -> list[Session]:
        """Several forks, by their ids or their number; of ephemeral ones nothing is written."""
        names = [None] * ids if isinstance(ids, int) else ids
        return [self._fork(name, ephemeral) for name in names]

    def _fork(self, id: str | None, ephemeral: bool) -> Session:  # noqa: A002
        forked = Session(
            self.engine,
            system=self.system,
            tools=self._toolbox.tools,
            id=id,
            messages=self._messages,
            sampling=self._defaults.sampling,
            kv=self._defaults.kv,
            thinking=self._defaults.thinking,
            policy=Policy.EPHEMERAL if ephemeral else self._defaults.policy,
            busy=self._gate.rule,
            repeated_calls=self._repeated_calls,
        )
        # NOTE: without messages a session opens the agent of its id; a fork is what it was made of.
        forked.system, forked._messages = self.system, self.messages
        forked._known, forked._turn_ends = self._known, list(self._turn_ends)
        self.engine.store.fork_import(self.id, forked.id)
        return forked

    def compact(self, instruction: str | None = None, max_tokens: int | None = None) -> Compacted:
        """Replace the conversation by the model's summary of it, and prefill that.

        It is one turn from then on. The summary costs only its own tokens.
        """
        with self._gate.hold():
            asked = self._known.request(self._defaults, self.system, self._messages)
            system = [{"role": "system", "content": self.system}] if self.system else []
            work = Compaction(
                self.engine, asked, [*system, *self._messages], instruction, max_tokens
            )
            result = self.engine.submit(work.request).result()
            work.warm(result).result()
            made = work.finish(result)
            self._messages = work.messages[len(system) :]
            self._turn_ends, self._known = [len(self._messages)], KnownConversation()
            return made

    def close(self) -> None:
        """Free its caches in memory. It cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def respond(
        self,
        question: Question,
        *,
        sampling: Sampling | None = None,
        format: Format | None = None,  # noqa: A002
    ) -> Reply:
        """Ask, run the tools that the model calls, and wait for the answer."""
        stream = self.stream(question, sampling=sampling, format=format)
        for _ in stream:
            continue
        return stream.reply

    async def arespond(
        self,
        question: Question,
        *,
        sampling: Sampling | None = None,
        format: Format | None = None,  # noqa: A002
    ) -> Reply:
        """`respond` as a coroutine."""
        stream = self.stream(question, sampling=sampling, format=format)
        async for _ in stream:
            continue
        return stream.reply

    def stream(
        self,
        question: Question,
        *,
        sampling: Sampling | None = None,
        format: Format | None = None,  # noqa: A002
    ) -> Stream:
        """Ask, and read the answer as it is generated, with `for` or `async for`.

        Nothing is sent before the first event is read.
        """
        options = replace(
            self._defaults, sampling=sampling or self._defaults.sampling, format=format
        )
        turn = SessionTurn(question, self._toolbox, self._repeated_calls)
        return Stream(turn, self._run(turn, options), self._arun(turn, options))

    def _run(self, turn: SessionTurn, options: Request) -> Generator[StreamEvent, None, None]:
        with self._gate.hold():
            known = self._begin(turn)
            while not turn.is_over:
                events: list[Event] = []
                answer = self.engine.submit(known.request(options, self.system, turn.messages))
                try:
                    for event in answer:
                        events.append(event)
                        if isinstance(event, StreamEvent):
                            yield event
                except BaseException:  # the caller may have closed the stream
                    answer.cancel()
                    raise
                calls = turn.add_answer(result := collect(events))
                known = known.after(answer.prepared, result, turn.messages)
                for call in calls:
                    turn.add_result(self._toolbox.run(call))
            self._end(turn, known)

    async def _arun(self, turn: SessionTurn, options: Request) -> AsyncGenerator[StreamEvent, None]:
        async with self._gate.ahold():
            known = self._begin(turn)
            while not turn.is_over:
                events: list[Event] = []
                request = known.request(options, self.system, turn.messages)
                answer = await asyncio.to_thread(self.engine.submit, request)
                try:
                    async for event in answer:
                        events.append(event)
                        if isinstance(event, StreamEvent):
                            yield event
                except BaseException:
                    answer.cancel()
                    raise
                calls = turn.add_answer(result := collect(events))
                known = known.after(answer.prepared, result, turn.messages)
                for call in calls:
                    turn.add_result(await self._toolbox.arun(call))
            self._end(turn, known)

    def _begin(self, turn: SessionTurn) -> KnownConversation:
        if not self._finalizer.alive:
            raise BadInput("The session is closed; open a new one with its messages.")
        turn.begin(self._messages)
        return self._known

    def _end(self, turn: SessionTurn, known: KnownConversation) -> None:
        """Add the turn to the conversation."""
        self._messages, self._known = turn.messages, known
        self._turn_ends.append(len(self._messages))

    def prewarm(self) -> Receipt | None:
        """Prefill everything before the next question, so that its answer starts sooner.

        Returns the cost; None if nothing comes before the question.
        """
        tokens = self._before_question()
        return self.engine.warm(self._warm_request(tokens)).result().receipt if tokens else None

    async def aprewarm(self) -> Receipt | None:
        """`prewarm` as a coroutine."""
        tokens = await asyncio.to_thread(self._before_question)
        if not tokens:
            return None
        answer = await asyncio.to_thread(self.engine.warm, self._warm_request(tokens))
        return (await answer.wait()).receipt

    def _warm_request(self, tokens: Sequence[int]) -> Request:
        return replace(self._defaults, prompt=tokens, tools=())

    def _before_question(self) -> Sequence[int]:
        """The tokens with which the next prompt begins, whatever the question."""
        whole = self._known.request(self._defaults, self.system, self._messages)
        return before_question(self.engine, whole, whole.messages or ())


class Stream(Iterator[StreamEvent], AsyncIterator[StreamEvent]):
    """The events of an answer as it is generated; `reply` is the whole answer, at the end."""

    def __init__(
        self,
        turn: SessionTurn,
        events: Generator[StreamEvent, None, None],
        aevents: AsyncGenerator[StreamEvent, None],
    ) -> None:
        self._turn = turn
        self._events = events
        self._aevents = aevents

    @property
    def reply(self) -> Reply:
        """The whole answer; BadInput before the stream has been read to its end."""
        return self._turn.reply

    def close(self) -> None:
        """Stop early; the turn adds no messages."""
        self._events.close()

    async def aclose(self) -> None:
        """`close` for a stream that is read with `async for`."""
        await self._aevents.aclose()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        return await anext(self._aevents)


def forget(engine: Engine, conversation: str, *, on_disk: bool = False) -> None:
    """Delete a conversation's caches in memory, and with `on_disk` its blocks on disk too.

    What other conversations share with it stays.
    """
    engine.call(lambda: engine.live.release_owned(conversation)).result()
    if on_disk:
        with suppress(UnknownAgent):
            engine.forget(conversation)


def _free(engine: Engine, conversation: str) -> None:
    """A finalizer may run anywhere, so the work is passed to the engine's thread."""
    with suppress(Stopping):
        engine.call(lambda: engine.live.release_owned(conversation))


def _turn_ends(messages: Sequence[Message]) -> list[int]:
    """The ends of turns, as message counts; each turn begins with a user message."""
    starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return [*starts[1:], len(messages)] if starts else []
