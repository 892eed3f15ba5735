"""A conversation for library users: what was said, and the tools that may be called meanwhile.

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
from keepwarm.session.conversations import Conversations, ConversationState
from keepwarm.session.gate import Gate, Rule
from keepwarm.session.prefixes import Prefixes, PrefixKey
from keepwarm.session.tool_functions import Function, Toolbox
from keepwarm.session.tool_rounds import Question, Reply, SessionTurn
from keepwarm.text.prompt import common_prefix
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

# Questions that begin so differently that what comes before any question is what they share:
# a line break or a blank may become one token with what the template writes before it.
PROBES = ("0", "A", "\n", " a")

StreamEvent: TypeAlias = Delta | ToolCalled


@dataclass(frozen=True)
class Registry:
    """What is known of conversations; sessions may share one."""

    prefixes: Prefixes = field(default_factory=Prefixes)
    conversations: Conversations = field(default_factory=Conversations)

    def invalidate(self, conversation: str) -> None:
        """Forget one conversation, and no other."""
        self.prefixes.invalidate(conversation)
        self.conversations.invalidate(conversation)


class Session:
    """One conversation. Its caches in memory are freed with it; what is on disk stays.

    It gives one answer at a time: with `busy="queue"` whoever asks meanwhile waits, with
    `"refuse"` they get Busy. A turn that fails, or is not read to its end, was never said.
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
        """`messages` is what was said before, as `session.messages` gave it."""
        self.engine = engine
        self.id = id or f"session-{secrets.token_hex(6)}"
        self.system = system
        self.registry = registry or Registry()
        self._toolbox = Toolbox(tools)
        self._asks = Request(
            tools=self._toolbox.schemas,
            sampling=sampling or Sampling(),
            kv=kv or engine.config.kv,
            thinking=thinking,
            policy=policy,
            agent=self.id,
        )
        self._said: list[Message] = [dict(message) for message in messages]
        self._ends = _turn_ends(self._said)  # in messages
        self._gate = Gate(busy)
        engine.store.check_agent(self.id)
        self._freed = weakref.finalize(self, _free, engine, self.id)
        self._freed.atexit = False

    # what was said

    @property
    def messages(self) -> list[Message]:
        """All that was said, without the system prompt."""
        return list(self._said)

    @property
    def n_turns(self) -> int:
        return len(self._ends)

    def rewind(self, turn: int) -> None:
        """Forget the turns after this one (0: all of them). What they share stays warm."""
        with self._gate.hold("refuse"):
            if not 0 <= turn <= self.n_turns:
                raise BadInput(f"There were {self.n_turns} turns; there is no turn {turn}.")
            self._ends = self._ends[:turn]
            self._said = self._said[: self._ends[-1] if turn else 0]
            self.registry.conversations.invalidate(self.id)

    def fork(self, id: str | None = None) -> Session:  # noqa: A002
        """Another session with the same past; what both share is computed for neither."""
        return Session(
            self.engine,
            system=self.system,
            tools=self._toolbox.tools,
            id=id,
            messages=self._said,
            sampling=self._asks.sampling,
            kv=self._asks.kv,
            thinking=self._asks.thinking,
            policy=self._asks.policy,
            busy=self._gate.rule,
            registry=self.registry,
        )

    def close(self) -> None:
        """Free its caches in memory. It may not be asked any more."""
        self._freed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # asking

    def respond(
        self,
        question: Question,
        *,
        sampling: Sampling | None = None,
        format: Format | None = None,  # noqa: A002
    ) -> Reply:
        """Ask, let the tools run, and wait for the answer."""
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
        """Ask, and read the answer with `for` or `async for` as it comes. Begins when read."""
        asks = replace(self._asks, sampling=sampling or self._asks.sampling, format=format)
        turn = SessionTurn(question, self._toolbox)
        return Stream(turn, self._run(turn, asks), self._arun(turn, asks))

    def _run(self, turn: SessionTurn, asks: Request) -> Generator[StreamEvent, None, None]:
        with self._gate.hold():
            self._begin(turn)
            while not turn.is_over:
                events: list[Event] = []
                answer = self.engine.submit(self._request(turn.messages, asks))
                try:
                    for event in answer:
                        events.append(event)
                        if isinstance(event, StreamEvent):
                            yield event
                except BaseException:  # the reader may have gone
                    answer.cancel()
                    raise
                for call in turn.answered(collect(events)):
                    turn.returned(self._toolbox.run(call))
            self._end(turn)

    async def _arun(self, turn: SessionTurn, asks: Request) -> AsyncGenerator[StreamEvent, None]:
        async with self._gate.ahold():
            self._begin(turn)
            while not turn.is_over:
                events: list[Event] = []
                request = self._request(turn.messages, asks)
                answer = await asyncio.to_thread(self.engine.submit, request)
                try:
                    async for event in answer:
                        events.append(event)
                        if isinstance(event, StreamEvent):
                            yield event
                except BaseException:
                    answer.cancel()
                    raise
                for call in turn.answered(collect(events)):
                    turn.returned(await self._toolbox.arun(call))
            self._end(turn)

    def _begin(self, turn: SessionTurn) -> None:
        if not self._freed.alive:
            raise BadInput("The session is closed; open another one with its messages.")
        turn.begin(self._said)

    def _end(self, turn: SessionTurn) -> None:
        """From here on the turn was said."""
        self._said = turn.messages
        self._ends.append(len(self._said))
        reply, model = turn.reply, str(self.engine.model.path)
        before = self.registry.conversations.get(self.id, model)
        last = reply.rounds[-1].usage
        state = ConversationState(
            n_tokens=last.prompt_tokens + last.completion_tokens,
            n_turns=self.n_turns,
            tokens_saved=reply.usage.cached_tokens + (before.tokens_saved if before else 0),
        )
        self.registry.conversations.update(self.id, model, state)

    def _request(self, said: Sequence[Message], asks: Request) -> Request:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return replace(asks, messages=[*system, *said])

    # before anybody asks

    def prewarm(self) -> Receipt | None:
        """Read all that comes before the next question, system prompt and tools at first, so that
        the answer to it begins sooner. What that cost; None where nothing comes before it.
        """
        tokens = self._before_question()
        return self.engine.warm(self._warming(tokens)).result().receipt if tokens else None

    async def aprewarm(self) -> Receipt | None:
        tokens = await asyncio.to_thread(self._before_question)
        if not tokens:
            return None
        answer = await asyncio.to_thread(self.engine.warm, self._warming(tokens))
        return (await answer.wait()).receipt

    def _warming(self, tokens: Sequence[int]) -> Request:
        return replace(self._asks, prompt=tokens, tools=())

    def _before_question(self) -> Sequence[int]:
        """The tokens with which the next prompt begins, whatever will be asked."""
        if self._said:
            return self._shared()
        model = str(self.engine.model.path)
        opening = PrefixKey(self.id, model, self.system or "", self._toolbox.schemas)
        known = self.registry.prefixes.get(opening)
        return (known or self.registry.prefixes.store(opening, self._shared())).tokens

    def _shared(self) -> list[int]:
        def prompt(question: str) -> list[int]:
            said = [*self._said, {"role": "user", "content": question}]
            return self.engine.prepare(self._request(said, self._asks)).tokens

        return reduce(lambda a, b: a[: common_prefix(a, b)], map(prompt, PROBES))


class Stream(Iterator[StreamEvent], AsyncIterator[StreamEvent]):
    """An answer as it comes. `reply` is the whole of it, at the end."""

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
        return self._turn.reply

    def close(self) -> None:
        """Stop before the end; then nothing was asked."""
        self._events.close()

    async def aclose(self) -> None:
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
    """Free what a conversation, and no other, keeps in memory; `on_disk` its blocks there too."""
    engine.call(lambda: engine.live.drop_owner(conversation)).result()
    if registry is not None:
        registry.invalidate(conversation)
    if on_disk:
        with suppress(UnknownAgent):
            engine.forget(conversation)


def _free(engine: Engine, conversation: str) -> None:
    """On the engine's thread: this may run inside of anything, whenever Python collects."""
    with suppress(Stopping):
        engine.call(lambda: engine.live.drop_owner(conversation))


def _turn_ends(messages: Sequence[Message]) -> list[int]:
    """Where turns end, in messages: each begins with what the user says."""
    starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return [*starts[1:], len(messages)] if starts else []
