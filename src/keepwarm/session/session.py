"""A conversation for library users: its messages, its tools, one turn at a time.

session = keepwarm.Session(engine, system="You answer in one sentence.")
print(session.respond("What is a fox?").text)
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import secrets
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from keepwarm.engine.answer import Answer, collect, sum_receipts, sum_usages
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput, KeepwarmError, RepeatedToolCall, Stopping, UnknownAgent
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.turn import KeptTurn
from keepwarm.session.compaction import Compacted, Compaction, before_question, restart_agent
from keepwarm.session.gate import Gate, Rule, acting_for_task
from keepwarm.store.tier import agent_owner
from keepwarm.text.prepare import PreparedRequest
from keepwarm.text.request import (
    Delta,
    Event,
    FinishReason,
    Format,
    KnownHistory,
    KVOptions,
    Message,
    Receipt,
    Request,
    Result,
    Sampling,
    Tool,
    ToolCall,
    ToolCalled,
    Usage,
)
from keepwarm.text.tools import assistant_message, canonical_tools, signature_of

# One turn of a conversation: a question, rounds of tool calls, an answer. Python functions are
# tools: their schemas come from signature and docstring. An error in a tool is reported to the
# model, which can then correct its call. `SessionTurn` neither calls the engine nor runs tools, so
# that sync and async callers share it.

Function: TypeAlias = Callable[..., Any]

_ARGS = re.compile(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\n)*)", re.MULTILINE)
_ARG = re.compile(r"^(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*(?:\n\1\s+.*)*)", re.MULTILINE)
MAX_ROUNDS = 8
# A text, or the results of the last reply's pending calls by call id.
Question: TypeAlias = str | Mapping[str, str]
RepeatRule: TypeAlias = Literal["raise", "return"]


class ToolResult(NamedTuple):
    """A call that was run, and its result as the model sees it."""

    call: ToolCall
    result: str  # the error, if it failed
    failed: bool = False


class Toolbox:
    """A session's tools. Functions are run here; tools given as schemas are left to the caller."""

    def __init__(self, tools: Iterable[Tool | Function] = ()) -> None:
        self.tools = tuple(tools)  # as given
        self.schemas = canonical_tools(map(_schema, self.tools))
        self._functions = {_name(tool): tool for tool in self.tools if callable(tool)}
        if len({schema["function"]["name"] for schema in self.schemas}) < len(self.tools):
            raise BadInput("Two tools have the same name; give each a name of its own.")

    def runs(self, call: ToolCall) -> bool:
        return call.name in self._functions

    def run(self, call: ToolCall) -> ToolResult:
        """Run a function in this thread."""
        made = self._start(call)
        if isinstance(made, ToolResult):
            return made
        made.close()
        raise BadInput(f"The tool {call.name!r} is async; use `arespond`, or `async for`.")

    async def arun(self, call: ToolCall) -> ToolResult:
        """Run a function in a thread of its own; await its coroutine, if it makes one."""
        with acting_for_task():
            made = await asyncio.to_thread(self._start, call)
        if isinstance(made, ToolResult):
            return made
        try:
            return ToolResult(call, _text(await made))
        except Exception as error:
            return _failed(call, error)

    def _start(self, call: ToolCall) -> ToolResult | Coroutine[Any, Any, Any]:
        """A function's result, or the coroutine that returns it."""
        try:
            made = validate_call(self._functions[call.name])(**json.loads(call.arguments))
            return made if inspect.iscoroutine(made) else ToolResult(call, _text(made))
        except Exception as error:  # a tool may raise anything, and return what is no JSON
            return _failed(call, error)


def schema_of(function: Function) -> Tool:
    """A function's tool schema."""
    name = _name(function)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]
        parameters = adapter.json_schema(schema_generator=_Untitled)
    except PydanticUserError as error:
        reason = str(error).partition(".")[0]
        raise BadInput(f"The tool {name!r} cannot be described as JSON: {reason}.") from error
    if parameters.get("type") != "object":
        raise BadInput(f"The tool {name!r} takes arguments without names; give each a name.")
    doc = inspect.cleandoc(function.__doc__ or "")
    _describe(parameters.get("properties", {}), doc)
    described = {"description": text} if (text := _ARGS.sub("", doc).strip()) else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def _schema(tool: Tool | Function) -> Tool:
    return schema_of(tool) if callable(tool) else tool


def _name(function: Function) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return name


class _Untitled(GenerateJsonSchema):
    """Without titles: they repeat the names of arguments, and cost prompt tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def _describe(properties: Mapping[str, dict[str, Any]], doc: str) -> None:
    """Add descriptions from the docstring's `Args:`; those of annotations take precedence."""
    found = _ARGS.search(doc)
    for _, name, text in _ARG.findall(found[1]) if found else ():
        if name in properties and text.strip():
            properties[name].setdefault("description", " ".join(text.split()))


def _failed(call: ToolCall, error: Exception) -> ToolResult:
    if isinstance(error, ValidationError):
        wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return ToolResult(call, f"Error: {'; '.join(wrong)}", failed=True)
    text = f"Error: {type(error).__name__}: {error}"
    return ToolResult(call, text.encode(errors="backslashreplace").decode(), failed=True)


def _text(result: Any) -> str:
    is_text = isinstance(result, str)
    text: str = result if is_text else json.dumps(result, ensure_ascii=False, default=str)
    text.encode()  # raises on a lone surrogate
    return text


def _check_characters(messages: Any) -> None:
    try:
        json.dumps(messages, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            "The messages contain a lone surrogate (half a character); pass valid Unicode."
        ) from error


@dataclass(frozen=True)
class Reply:
    """The answer to a question; `usage` and `receipt` are totals of all rounds."""

    text: str  # of the last round; of all of them, where a repeated call ended it
    reasoning: str  # of the last round
    calls: tuple[ToolResult, ...]  # that the session ran, in order
    pending: tuple[ToolCall, ...]  # for the caller to run; answer with `respond({id: result})`
    reason: FinishReason  # why the last round ended
    usage: Usage
    receipt: Receipt
    rounds: tuple[Result, ...]  # the answer of each round


class SessionTurn:
    """The state of a turn. Until `is_over`: ask `messages`, `add_answer`, run the calls that it
    returns, and `add_result` of each.
    """

    def __init__(
        self, question: Question, toolbox: Toolbox, repeated_calls: RepeatRule = "raise"
    ) -> None:
        """After calls that repeat the previous round's the turn is over: `raise` discards it,
        `return` leaves them to the caller, as those after the last round."""
        self.question = question
        self.messages: list[Message] = []
        self.is_over = False
        self._toolbox = toolbox
        self._rounds: list[Result] = []
        self._results: list[ToolResult] = []
        self._pending: tuple[ToolCall, ...] = ()
        self._previous: set[str] = set()  # calls of the previous round
        self._rule = repeated_calls
        self._is_repeated = False

    def begin(self, messages: Sequence[Message]) -> None:
        """Append the question to the conversation so far."""
        if self.messages:
            raise BadInput("A stream is read once; ask again.")
        asked = _as_messages(self.question, messages)
        _check_characters(asked)
        self.messages = [*messages, *asked]

    def add_answer(self, result: Result) -> list[ToolCall]:
        """Add an answer; returns its calls that are to be run now."""
        self._rounds.append(result)
        choice = result.choices[0]
        self._compare(choice.tool_calls)
        self.messages.append(assistant_message(choice.text, choice.reasoning, choice.tool_calls))
        may_run = len(self._rounds) <= MAX_ROUNDS and not self._is_repeated
        ours = [call for call in choice.tool_calls if may_run and self._toolbox.runs(call)]
        self._pending = tuple(call for call in choice.tool_calls if call not in ours)
        self.is_over = not ours or bool(self._pending)
        return ours

    def add_result(self, result: ToolResult) -> None:
        self._results.append(result)
        self.messages.append(_tool_message(result.call.id, result.call.name, result.result))

    @property
    def reply(self) -> Reply:
        if not self.is_over:
            raise BadInput("The answer is not complete yet; read the stream to its end first.")
        last = self._rounds[-1].choices[0]
        return Reply(
            self._text if self._is_repeated else last.text,
            last.reasoning,
            tuple(self._results),
            self._pending,
            last.reason,
            sum_usages([result.usage for result in self._rounds]),
            sum_receipts([result.receipt for result in self._rounds]),
            tuple(self._rounds),
        )

    @property
    def _text(self) -> str:
        """Of all rounds."""
        return "".join(result.choices[0].text for result in self._rounds)

    def _compare(self, calls: Sequence[ToolCall]) -> None:
        """With those of the previous round."""
        now = {signature_of(call.name, call.arguments) for call in calls}
        again, self._previous = now & self._previous, now
        self._is_repeated = bool(again)
        if again and self._rule == "raise":
            raise RepeatedToolCall(
                f"The model made the same tool call twice in a row, {min(again)}; the turn was "
                "discarded. Rephrase the question.",
                self._text,
            )


def pending_calls(messages: Sequence[Message]) -> dict[str, str]:
    """The calls of the last answer that have no result yet: names by call id."""
    calls: dict[str, str] = {}
    for message in messages:
        if message["role"] == "assistant":
            made = message.get("tool_calls") or ()
            calls = {call["id"]: call["function"]["name"] for call in made}
        elif message["role"] == "tool":
            calls.pop(message["tool_call_id"], None)
    return calls


def _as_messages(question: Question, messages: Sequence[Message]) -> list[Message]:
    waiting = pending_calls(messages)
    if isinstance(question, str):
        if waiting:
            raise BadInput(
                f"Tool calls wait for their results ({', '.join(waiting)}); "
                "send the results by call id, or rewind."
            )
        return [{"role": "user", "content": question}]
    if not waiting:
        raise BadInput("No tool call waits for a result; ask a question instead.")
    if waiting.keys() != question.keys():
        raise BadInput(
            f"Results were sent for {sorted(question)}, but the pending calls are "
            f"{sorted(waiting)}; send one for each."
        )
    return [_tool_message(call, name, question[call]) for call, name in waiting.items()]


def _tool_message(call: str, name: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call, "name": name, "content": text}


# Conversations.

StreamEvent: TypeAlias = Delta | ToolCalled


@dataclass(frozen=True)
class KnownConversation:
    """Nothing, for most sessions: then every request has all messages."""

    history: KnownHistory | None = None
    n_messages: int = 0  # of the session, that are in the history

    @classmethod
    def of_agent(cls, engine: Engine, options: Request) -> Self:
        """What the store has of a session's agent."""
        if not engine.knows_agent(str(options.agent)):
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


class DroppedTurn(NamedTuple):
    """A turn that ended early, and whether another session had gone on with its agent before."""

    turn: SessionTurn
    is_stale: Callable[[], bool]


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
        _check_characters([system, *messages])
        self._messages: list[Message] = [dict(message) for message in messages]
        self._known = KnownConversation()
        if id is not None and not messages:
            self._open(KnownConversation.of_agent(engine, self._defaults).history)
        self._turn_ends = _turn_ends(self._messages)  # in messages
        self._dropped: DroppedTurn | None = None  # to be discarded
        self._finalizer = weakref.finalize(self, _free, engine, self.id)
        self._finalizer.atexit = False

    def _open(self, found: KnownHistory | None) -> None:
        """Continue a conversation; with another system prompt it is rendered anew."""
        first, kept = _split(found.turn if found else None)
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
        """Drop the turns after this one (0: all of them), of the session's agent too. The cached
        prefix stays.
        """
        with self._gate.hold("refuse"):
            if not 0 <= turn <= self.n_turns:
                raise BadInput(f"The session has {self.n_turns} turns; there is no turn {turn}.")
            self._check_kept()
            n_kept = self._turn_ends[turn - 1] if turn else 0
            self._discard_dropped()
            self._rewind_agent(self._messages, n_kept)
            self._turn_ends = self._turn_ends[:turn]
            self._messages = self._messages[:n_kept]
            self._known = KnownConversation()
            with suppress(Stopping):
                self.engine.call(lambda: self.engine.live.abandon(self.id)).result()

    def _check_kept(self) -> None:
        if self._known.history is not None and self._known.history.turn is None:
            raise BadInput(
                "The earlier messages of this session were not kept; rewind its agent in the "
                "store, and open the session again."
            )

    def _rewind_agent(self, messages: Sequence[Message], n_kept: int) -> None:
        """To the first of these messages, if it has said them, with an answer more at most.
        Another session may have gone on with it.
        """
        is_kept = self._defaults.policy.to_disk or self.engine.store.is_ephemeral(self.id)
        if is_kept and not self._defaults.nameless and self.engine.knows_agent(self.id):
            _, said = _split(self.engine.store.on_disk.latest_turn(self.id).turn)
            n_said, kept = len(said), list(messages[:n_kept])
            is_same = n_said <= len(messages) + 1 and said[: len(messages)] == messages[:n_said]
            if is_same and _n_answers(said) > _n_answers(kept):
                self._rewind_to(kept)

    def _rewind_to(self, kept: list[Message]) -> None:
        """To its turn that ended with these messages. It may have none: a fork's first request has
        messages already, and an answer that was cut is other tokens in the next prompt.
        """
        agents = self.engine.store.on_disk.agents
        turns = agents.turns.find_by_ends(self.id, agents.show(self.id).head.ends)
        said = [messages for _, messages in map(_split, turns)]
        is_turn = bool(kept) and kept in said
        if is_turn or not kept:
            agents.rewind(self.id, said.index(kept) + 1 if is_turn else 0)
        else:
            system = [{"role": "system", "content": self.system}] if self.system else []
            whole = [*system, *kept]
            tokens = before_question(self.engine, self._defaults, whole)
            restart_agent(self.engine, self._defaults, whole, tokens)

    def _discard_dropped(self) -> None:
        """From its agent, what was recorded of a turn that ended early."""
        dropped = self._dropped
        with suppress(KeepwarmError, RuntimeError):  # the engine is closed, or the store fails
            if dropped is not None and not dropped.is_stale():
                self._rewind_agent(dropped.turn.messages, len(self._messages))
        self._dropped = None

    def _staleness(self) -> Callable[[], bool]:
        """A function that tells, also later, whether another session has gone on with its agent by
        now: its turns are not to be lost. Only that function reads messages, which may be many.
        """
        self._discard_dropped()
        store = self.engine.store
        try:
            if self._defaults.nameless or not store.knows_agent(self.id):
                return lambda: False
            agent = store.on_disk.agents.show(self.id)
        except KeepwarmError:  # its file cannot be read
            return lambda: True

        name, own = self.id, self._messages  # not `self`, which would then be freed late

        def is_stale() -> bool:
            turn = next(
                iter(store.on_disk.agents.turns.find_by_ends(name, agent.blocks[-1:])), None
            )
            n_said = len(agent.turns) if turn is None else _n_answers(turn.messages)
            return n_said > _n_answers(own)

        return is_stale

    def _is_stale(self) -> bool:
        return self._staleness()()

    @contextmanager
    def _whole(self, turn: SessionTurn) -> Iterator[None]:
        """Inside, a turn that ends early is discarded; one that may not begin never was one."""
        self._begin(turn)
        is_stale = self._staleness()
        try:
            yield
        except BaseException as error:
            self._dropped = DroppedTurn(turn, is_stale)
            if _may_wait(error):
                self._discard_dropped()
            raise

    @asynccontextmanager
    async def _awhole(self, turn: SessionTurn) -> AsyncIterator[None]:
        self._begin(turn)
        is_stale = await asyncio.to_thread(self._staleness)
        try:
            yield
        except BaseException as error:
            self._dropped = DroppedTurn(turn, is_stale)
            if _may_wait(error):
                await asyncio.to_thread(self._discard_dropped)
            raise

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
        policy = forked._defaults.policy
        is_written = policy is Policy.DURABLE or (policy.to_disk and id is not None)
        self.engine.store.fork_import(self.id, forked.id, ephemeral=not is_written)
        return forked

    def compact(self, instruction: str | None = None, max_tokens: int | None = None) -> Compacted:
        """Replace the conversation by the model's summary of it, and prefill that.

        It is one turn from then on. The summary costs only its own tokens.
        """
        with self._gate.hold():
            self._check_compactable()
            asked = self._known.request(self._defaults, self.system, self._messages)
            system = [{"role": "system", "content": self.system}] if self.system else []
            messages = [*system, *self._messages]
            options = asked, messages, instruction, max_tokens
            work = Compaction(self.engine, *options, is_stale=self._is_stale)
            work.check()
            result = self.engine.submit(work.request).result()
            work.warm(result).result()
            made = work.finish(result)
            self._messages = work.messages[len(system) :]
            self._turn_ends, self._known = [len(self._messages)], KnownConversation()
            return made

    def _check_compactable(self) -> None:
        self._check_open()
        self._check_kept()
        if waiting := pending_calls(self._messages):
            raise BadInput(
                f"Tool calls wait for their results ({', '.join(waiting)}), which a summary would "
                "lose; send the results by call id, or rewind."
            )

    def close(self) -> None:
        """Free its caches in memory. It cannot be used afterwards.

        May wait for the engine if a stream was left without being closed.
        """
        self._discard_dropped()
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
        if options.sampling.max_tokens == 0:
            raise BadInput("With max_tokens 0 there is no answer; raise it, or use `prewarm`.")
        turn = SessionTurn(question, self._toolbox, self._repeated_calls)
        return Stream(turn, self._run(turn, options), self._arun(turn, options))

    def _run(self, turn: SessionTurn, options: Request) -> Generator[StreamEvent, None, None]:
        with self._gate.hold(), self._whole(turn):
            known = self._known
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
        async with self._gate.ahold(), self._awhole(turn):
            known = self._known
            while not turn.is_over:
                events: list[Event] = []
                request = known.request(options, self.system, turn.messages)
                answer = await _asubmit(self.engine.submit, request)
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

    def _begin(self, turn: SessionTurn) -> None:
        self._check_open()
        turn.begin(self._messages)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise BadInput("The session is closed; open a new one with its messages.")

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
        answer = await _asubmit(self.engine.warm, self._warm_request(tokens))
        return (await answer.wait()).receipt

    def _warm_request(self, tokens: Sequence[int]) -> Request:
        return replace(self._defaults, prompt=tokens, tools=())

    def _before_question(self) -> Sequence[int]:
        """The tokens with which the next prompt begins, whatever the question."""
        self._check_open()
        whole = self._known.request(self._defaults, self.system, self._messages)
        return before_question(self.engine, whole, whole.messages or ())


async def _asubmit(submit: Callable[[Request], Answer], request: Request) -> Answer:
    """Submit from a thread, which goes on if the caller is cancelled; nobody would read its
    answer."""
    submitted: Future[Answer] = Future()
    try:
        await asyncio.to_thread(lambda: submitted.set_result(submit(request)))
        return submitted.result()
    except asyncio.CancelledError:
        submitted.add_done_callback(lambda done: done.result().cancel())
        raise


class StreamClosed(GeneratorExit):
    """By its reader, and not by the collector, which may run anywhere and must not wait."""


def _may_wait(error: BaseException) -> bool:
    return type(error) is not GeneratorExit


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
        with suppress(StreamClosed):
            self._events.throw(StreamClosed)

    async def aclose(self) -> None:
        """`close` for a stream that is read with `async for`."""
        with suppress(StreamClosed, StopAsyncIteration):
            await self._aevents.athrow(StreamClosed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        return await anext(self._aevents)


def forget(engine: Engine, conversation: str, *, on_disk: bool = False) -> None:
    """Free a conversation's live caches; with `on_disk` delete its agent and its blocks too.

    What other conversations share with it stays.
    """
    engine.call(lambda: engine.live.release_owned(conversation)).result()
    if on_disk:
        try:
            engine.forget(conversation)
        except UnknownAgent:  # it may have blocks in memory
            engine.store.on_disk.disk.forget(agent_owner(conversation), ())
            engine.store.catch_up()


def _free(engine: Engine, conversation: str) -> None:
    """A finalizer may run anywhere, also amid work of the engine's thread, which does this after
    it."""
    with suppress(Stopping):
        engine.run_later(lambda: engine.live.release_owned(conversation))


def _split(turn: KeptTurn | None) -> tuple[str | None, list[Message]]:
    """System prompt and messages of a kept conversation."""
    kept: list[Message] = list(turn.messages) if turn else []
    first = kept.pop(0)["content"] if kept and kept[0]["role"] == "system" else None
    return first, kept


def _n_answers(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _turn_ends(messages: Sequence[Message]) -> list[int]:
    """The ends of turns, as message counts; each turn begins with a user message."""
    starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return [*starts[1:], len(messages)] if starts else []
