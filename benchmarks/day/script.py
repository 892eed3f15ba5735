"""The requests of a day in their order, each with the history that its client believes in.

The shape is opencode's: a title request before a session, system text and tools, calls and results
of tools, sub-agents, and a compaction that sends the conversation as one text. Questions, results
and answers are as long as in recorded conversations. The words are random: what costs time is how
many there are and what they have in common. What the assistant said is part of the script, so that
every server is sent the same; what a server really answers is only measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from benchmarks.requests import recorded
from benchmarks.requests.client import Message
from benchmarks.requests.prompts import PromptGenerator, assistant, system, user

TURNS = 60  # of the first person
LEAST_TURNS = 12  # with fewer, two events would fall on one turn
HOURS = range(9, 18)
NOON = 1 / 3  # of the day

# Tokens, before they are divided by the scale.
SYSTEM, TOOLS = 5_000, 23_000
SUB_SYSTEM, SUB_TOOLS = 1_500, 8_000
TITLE, SUMMARY = 200, 1_500
COMPACTED = 128_000  # where the conversation is compacted, in a whole day

# Recorded conversations: by their place in the trace. Their first prompts have tools and system
# text of their own, of about so many tokens.
FIRST, OTHER, SECOND, SUB = 358, 330, 355, 282
RECORDED_HEAD = 14_800

# Kinds of requests
BEGIN, TURN, RETURN, TITLED = "first of a session", "turn", "back in a project", "title"
SUB_BEGIN, SUB_TURN = "first of a sub-agent", "turn of a sub-agent"
COMPACT, COMPACTED_TURN = "compaction", "after compaction"

# What happens to the servers before a turn, by the share of the day
RESTART, KILL, CAP = "restart", "kill -9", "restart at the disk's cap"
EVENTS = ((1 / 5, RESTART), (7 / 15, KILL), (1 / 2, RESTART), (2 / 3, CAP))
AFTER = {RESTART: "after a restart", KILL: "after kill -9", CAP: "after a restart"}

OTHER_PROJECT = (1 / 4, 2 / 5)  # the share of the day that is spent there
SUB_AGENTS = (1 / 10, 11 / 20, 17 / 20)
COMPACTION = 4 / 5
QUESTION_EVERY = 6  # turns; between two questions the model works with tools
IMAGE_EVERY = 3  # questions
NAMES = ("read", "edit", "task", "bash", "glob", "grep", "list", "write", "webfetch", "todowrite")


class Lengths(NamedTuple):
    """Of one turn, in tokens: what the model is sent, and what it says."""

    n_read: int
    n_said: int


@dataclass(frozen=True)
class DayRequest:
    """What one client sends; `session` is its own name of the conversation."""

    kind: str
    person: int
    session: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Step:
    """Requests that are sent at the same moment, and what happens to the servers before."""

    hour: int
    requests: Sequence[DayRequest]
    event: str = ""


def lengths_of(conversation: recorded.RecordedConversation) -> list[Lengths]:
    """Every turn of a recorded conversation, beyond its system text and tools."""
    before, found = RECORDED_HEAD, []
    for _, _, n_input, n_output in conversation.turns:
        found.append(Lengths(max(16, n_input - before), n_output))
        before = n_input + n_output
    return found


@dataclass(frozen=True)
class Writer:
    """Texts and tools of a length in tokens, divided by the scale."""

    prompts: PromptGenerator
    scale: int

    def text(self, n_tokens: int, *seed: object) -> str:
        return self.prompts.text(max(2, n_tokens // self.scale), seed)

    def tools(self, n_tokens: int) -> list[Mapping[str, Any]]:
        """As many as have room for a description."""
        n_tools = min(len(NAMES), max(2, n_tokens // self.scale // 150))
        each = n_tokens // n_tools
        return [self._tool(name, each) for name in NAMES[:n_tools]]

    def _tool(self, name: str, n_tokens: int) -> Mapping[str, Any]:
        n_about = max(self.scale, n_tokens - 60 * self.scale)  # what JSON takes is not divided
        fields = {
            "filePath": {"type": "string", "description": "The file."},
            "content": {"type": "string"},
        }
        parameters = {"type": "object", "properties": fields, "required": ["filePath"]}
        about = self.text(n_about, "tool", name)
        function = {"name": name, "description": about, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass
class Session:
    """One conversation, which grows turn by turn."""

    writer: Writer
    name: str
    person: int
    lengths: Sequence[Lengths]
    system: str
    tools: Sequence[Mapping[str, Any]]
    n_turns: int = 0
    n_images: int = 0
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [system(self.system)]

    def title(self) -> DayRequest:
        """opencode asks for one before the first turn."""
        asked = self.writer.text(TITLE, self.name, "title")
        about = self.writer.text(TITLE, "titles")
        return self._request(TITLED, [system(about), user(asked)], [])

    def turn(self, kind: str = TURN) -> DayRequest:
        sizes = self.lengths[self.n_turns % len(self.lengths)]
        read = self.writer.text(sizes.n_read, self.name, self.n_turns, "read")
        self.messages.append(self._question(read) if self._is_question else self._result(read))
        asked = self._request(kind, list(self.messages), self.tools)
        self.n_turns += 1
        self.messages.append(self._answer(sizes.n_said))
        return asked

    def compact(self) -> DayRequest:
        """The whole conversation as one text; then it goes on from a summary of it."""
        text = "\n\n".join(message["content"] for message in self.messages[1:])
        about = self.writer.text(TITLE, "compaction")
        summary = self.writer.text(SUMMARY, self.name, "summary")
        self.messages = [self.messages[0], user("What did we do so far?"), assistant(summary)]
        self.n_turns += -self.n_turns % QUESTION_EVERY  # a question comes next
        return self._request(COMPACT, [system(about), user(text)], [])

    @property
    def _is_question(self) -> bool:
        return self.n_turns % QUESTION_EVERY == 0

    def _request(
        self, kind: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> DayRequest:
        return DayRequest(kind, self.person, self.name, messages, tools)

    def _question(self, text: str) -> Message:
        if self.n_turns // QUESTION_EVERY % IMAGE_EVERY != 1:
            return user(text)
        self.n_images += 1
        return user(f"[Image {self.n_images}: a screenshot of 1280 by 720] {text}")

    def _result(self, text: str) -> Message:
        return {"role": "tool", "tool_call_id": f"call_{self.n_turns}", "content": text}

    def _answer(self, n_tokens: int) -> Message:
        """A call of a tool, unless the person speaks next."""
        said = self.writer.text(n_tokens // 2, self.name, self.n_turns, "said")
        if self._is_question:
            return assistant(said)
        content = self.writer.text(n_tokens // 2, self.name, self.n_turns, "written")
        given = {"filePath": f"src/part_{self.n_turns}.py", "content": content}
        name = NAMES[self.n_turns % 2]
        function = {"name": name, "arguments": json.dumps(given, separators=(",", ":"))}
        call = {"id": f"call_{self.n_turns}", "type": "function", "function": function}
        return {**assistant(said), "tool_calls": [call]}


class Day:
    """Two projects of one person, sub-agents, and from noon on a second person."""

    def __init__(self, prompts: PromptGenerator, n_turns: int = TURNS, scale: int = 1) -> None:
        self._writer = Writer(prompts, scale)
        self._n_turns = n_turns
        self._recorded = recorded.load(1 + max(FIRST, OTHER, SECOND, SUB))
        self._tools = self._writer.tools(TOOLS)
        self._first = self._session("first", 1, "/home/one/first", FIRST)
        self._other = self._session("other", 1, "/home/one/other", OTHER)
        self._second = self._session("second", 2, "/home/two/first", SECOND)
        self._events = {self._at(share): event for share, event in EVENTS}

    def _session(self, name: str, person: int, folder: str, number: int) -> Session:
        """All have one client: the system text differs where it names the folder."""
        text = self._writer.text(SYSTEM, "system")
        env = f"{text}\n\n<env>\n  Working directory: {folder}\n</env>"
        lengths = lengths_of(self._recorded[number])
        return Session(self._writer, name, person, lengths, env, self._tools)

    def _at(self, share: float) -> int:
        return int(share * self._n_turns + 1e-9)

    def steps(self) -> Iterator[Step]:
        for turn in range(self._n_turns):
            hour = HOURS[turn * len(HOURS) // self._n_turns]
            for step in self._steps(turn):
                yield replace(step, hour=hour)

    def _steps(self, turn: int) -> Iterator[Step]:
        session = self._session_of(turn)
        for new in self._begin(turn, session):
            yield Step(0, [new.title()])
        if turn == self._at(COMPACTION):
            yield Step(0, [session.compact()])
        event = self._events.get(turn, "")
        requests = [session.turn(self._kind(turn, session))]
        if self._is_second_here(turn):
            requests.append(self._second.turn(TURN if self._second.n_turns else BEGIN))
        if event:
            requests = [replace(request, kind=AFTER[event]) for request in requests]
        yield Step(0, requests, event)
        if turn in map(self._at, SUB_AGENTS):
            yield from self._sub_agents(turn)

    def _session_of(self, turn: int) -> Session:
        begin, end = map(self._at, OTHER_PROJECT)
        return self._other if begin <= turn < end else self._first

    def _begin(self, turn: int, session: Session) -> list[Session]:
        """The sessions that begin with this turn."""
        found = [] if session.n_turns else [session]
        return [*found, self._second] if turn == self._at(NOON) else found

    def _kind(self, turn: int, session: Session) -> str:
        if session.n_turns == 0:
            return BEGIN
        if turn == self._at(COMPACTION):
            return COMPACTED_TURN
        return TURN if session is self._session_of(turn - 1) else RETURN

    def _is_second_here(self, turn: int) -> bool:
        """The second person asks half as often."""
        since = turn - self._at(NOON)
        return since >= 0 and since % 2 == 0

    def _sub_agents(self, turn: int) -> Iterator[Step]:
        """Two at once, of three turns each."""
        lengths = lengths_of(self._recorded[SUB])
        tools = self._tools[: max(1, len(self._tools) * SUB_TOOLS // TOOLS)]
        text = self._writer.text(SUB_SYSTEM, "sub-agent")
        subs = [
            Session(self._writer, f"sub {turn} {n}", 1, lengths[2 + 3 * n :], text, tools)
            for n in range(2)
        ]
        for number in range(3):
            kind = SUB_TURN if number else SUB_BEGIN
            yield Step(0, [sub.turn(kind) for sub in subs])
