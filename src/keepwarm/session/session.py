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
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Self, TypeAlias

from keepwarm.cache.policy import Policy
from keepwarm.engine.answer import collect
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput, Stopping, UnknownAgent
from keepwarm.prefix.blocks import common_prefix
from keepwarm.session.conversations import Conversations, ConversationState
from keepwarm.session.gate import Gate, Rule
from keepwarm.session.prefixes import Prefixes, PrefixKey
from keepwarm.session.tool_functions import Function, Toolbox
from keepwarm.session.tool_rounds import Question, Reply, SessionTurn
from keepwarm.text.request import (
    Delta,
    Event,
    Format,
    KVOptions,
    Message,
    Receipt,
    Request,
    Sampling,
    Tool,
    ToolCalled,
)

# Questions with nothing in common: the prompts share exactly what comes before any question. A
# line break or a space may merge into one token with the template's text before it.
PROBES = ("0", "A", "\n", " a")

StreamEvent: TypeAlias = Delta | ToolCalled


@dataclass(frozen=True)
class Registry:
    """The prefixes and states of conversations; sessions may share one registry."""

    prefixes: Prefixes = field(default_factory=Prefixes)
    conversations: Conversations = field(default_factory=Conversations)

    def invalidate(self, conversation: str) -> None:
        """Delete everything about one conversation."""
        self.prefixes.invalidate(conversation)
        self.conversations.invalidate(conversation)


class Session:
    """One conversation. Closing it frees its caches in memory; its blocks on disk stay.

    It answers one question at a time. Meanwhile other callers wait (`busy="queue"`) or get Busy
    (`busy="refuse"`). A turn that fails, or is not read to its end, leaves no messages.
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
        registry: Registry | None = None,
    ) -> None:
        """`messages` are those of an earlier session, as `session.messages` returned them."""
        self.engine = engine
        self.id = id or f"session-{secrets.token_hex(6)}"
        self.system = system
        self.registry = registry or Registry()
        self._toolbox = Toolbox(tools)
        self._defaults = Request(
            tools=self._toolbox.schemas,
            sampling=sampling or Sampling(),
            kv=kv or engine.config.kv,
            thinking=thinking,
            policy=policy,
            agent=self.id,
        )
        self._messages: list[Message] = [dict(message) for message in messages]
        self._turn_ends = _turn_ends(self._messages)  # in messages
        self._gate = Gate(busy)
        engine.store.check_agent(self.id)
        self._finalizer = weakref.finalize(self, _free, engine, self.id)
        self._finalizer.atexit = False

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
            self._turn_ends = self._turn_ends[:turn]
            self._messages = self._messages[: self._turn_ends[-1] if turn else 0]
            self.registry.conversations.invalidate(self.id)

    def fork(self, id: str | None = None) -> Session:  # noqa: A002
        """Another session with the same messages; their common prefix is not computed again."""
        forked = Session(
            self.engine,
            system=self.system,
            tools=self._toolbox.tools,
            id=id,
            messages=self._messages,
            sampling=self._defaults.sampling,
            kv=self._defaults.kv,
            thinking=self._defaults.thinking,
            policy=self._defaults.policy,
            busy=self._gate.rule,
            registry=self.registry,
        )
        self.engine.store.fork_import(self.id, forked.id)
        return forked

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
        turn = SessionTurn(question, self._toolbox)
        return Stream(turn, self._run(turn, options), self._arun(turn, options))

    def _run(self, turn: SessionTurn, options: Request) -> Generator[StreamEvent, None, None]:
        with self._gate.hold():
            self._begin(turn)
            while not turn.is_over:
                events: list[Event] = []
                answer = self.engine.submit(self._request(turn.messages, options))
                try:
                    for event in answer:
                        events.append(event)
                        if isinstance(event, StreamEvent):
                            yield event
                except BaseException:  # the caller may have closed the stream
                    answer.cancel()
                    raise
                for call in turn.add_answer(collect(events)):
                    turn.add_result(self._toolbox.run(call))
            self._end(turn)

    async def _arun(self, turn: SessionTurn, options: Request) -> AsyncGenerator[StreamEvent, None]:
        async with self._gate.ahold():
            self._begin(turn)
            while not turn.is_over:
                events: list[Event] = []
                request = self._request(turn.messages, options)
                answer = await asyncio.to_thread(self.engine.submit, request)
                try:
                    async for event in answer:
                        events.append(event)
                        if isinstance(event, StreamEvent):
                            yield event
                except BaseException:
                    answer.cancel()
                    raise
                for call in turn.add_answer(collect(events)):
                    turn.add_result(await self._toolbox.arun(call))
            self._end(turn)

    def _begin(self, turn: SessionTurn) -> None:
        if not self._finalizer.alive:
            raise BadInput("The session is closed; open a new one with its messages.")
        turn.begin(self._messages)

    def _end(self, turn: SessionTurn) -> None:
        """Add the turn to the conversation."""
        self._messages = turn.messages
        self._turn_ends.append(len(self._messages))
        reply, model = turn.reply, str(self.engine.model.path)
        before = self.registry.conversations.get(self.id, model)
        last = reply.rounds[-1].usage
        state = ConversationState(
            n_tokens=last.prompt_tokens + last.completion_tokens,
            n_turns=self.n_turns,
            tokens_saved=reply.usage.cached_tokens + (before.tokens_saved if before else 0),
        )
        self.registry.conversations.update(self.id, model, state)

    def _request(self, messages: Sequence[Message], options: Request) -> Request:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return replace(options, messages=[*system, *messages])

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
        if self._messages:
            return self._shared_tokens()
        model = str(self.engine.model.path)
        prefix = PrefixKey(self.id, model, self.system or "", self._toolbox.schemas)
        known = self.registry.prefixes.get(prefix)
        return (known or self.registry.prefixes.store(prefix, self._shared_tokens())).tokens

    def _shared_tokens(self) -> list[int]:
        def prompt(question: str) -> list[int]:
            messages = [*self._messages, {"role": "user", "content": question}]
            return self.engine.prepare(self._request(messages, self._defaults)).tokens

        return reduce(lambda a, b: a[: common_prefix(a, b)], map(prompt, PROBES))


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
        """Stop early; the turn leaves no messages."""
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


def forget(
    engine: Engine, conversation: str, registry: Registry | None = None, *, on_disk: bool = False
) -> None:
    """Delete a conversation's caches in memory, and with `on_disk` its blocks on disk too.

    What other conversations share with it stays.
    """
    engine.call(lambda: engine.live.release_owned(conversation)).result()
    if registry is not None:
        registry.invalidate(conversation)
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
