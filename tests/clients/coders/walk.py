"""One client's way: what it is asked, what happens to the server and to its agent in between.

After every step the agent's head must be the conversation: as long as the last prompt of the
conversation with its answer. Requests that are much shorter are taken for the client's own side
requests, such as one for a title.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.coders.model import FILE, NOTE, write_model
from tests.clients.coders.programs import Place, Program
from tests.clients.coders.served import Asked, Server

TITLE = {
    "messages": [
        {"role": "system", "content": "Write a short title for the conversation. Only the title."},
        {"role": "user", "content": f"What does {FILE} say?"},
    ],
    "max_tokens": 32,
}
NEXT = {"messages": [{"role": "user", "content": "And then?"}], "max_tokens": 64}
SIDE = 0.5  # of the longest prompt of a step
SECOND = "second question"


@dataclass(frozen=True)
class Cost:
    """One request and its new tokens, where it goes on from a conversation that is known."""

    asked: Asked
    is_side: bool
    n_new: int | None


@dataclass(frozen=True)
class Step:
    """What was done, what it cost, and what the agent is afterwards."""

    name: str
    agent: str
    costs: Sequence[Cost]
    head: int  # tokens
    expected: int  # tokens that the conversation has
    turns: int
    branches: int

    @property
    def keeps_head(self) -> bool:
        return self.head == self.expected

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "keeps_head": self.keeps_head}


@dataclass
class Walk:
    """The steps of one client, one after the other."""

    program: Program
    programs: Path
    folder: Path
    steps: list[Step] = field(default_factory=list)
    session: str = ""  # by the client's own name
    end: int = 0  # tokens of that session
    head: int = 0  # tokens that the agent's head should have

    def __post_init__(self) -> None:
        self.project = self._project("project")
        called = self.program.call(self.project)
        self.model = write_model(self.folder / "model", self.program.tool, called)
        (self.folder / "server").mkdir()
        self.server = Server(self.model, self.folder / "server")
        self.agent = self.program.name

    def run(self) -> list[Step]:
        self.server.start()
        try:
            self._talk()
        finally:
            self.server.kill()
        return self.steps

    def _talk(self) -> None:
        self.ask("first question", f"What does {FILE} say?", is_first=True)
        self.ask(SECOND, "And what else?")
        self.title()
        self.ask("question after it", "Is there more?")
        self.restart()
        self.ask("question after `kill -9`", "Are you still there?")
        self.rewind()
        self.ask("the client, with its whole history", "What was that?")
        self.fork()
        self.ask("the parent goes on", "Where were we?")
        self.compact()
        self.begin_anew("new session, same project")
        self.project = self._project("elsewhere")
        self.begin_anew("new session, other project")

    def _project(self, name: str) -> Path:
        project = self.folder / name
        project.mkdir()
        (project / FILE).write_text(NOTE + "\n")
        return project

    # What the client does

    def ask(self, name: str, text: str, *, is_first: bool = False) -> None:
        self._send(self.program.ask if is_first else self.program.resume, text)
        self._note(name, self.end)
        self.end = self.head

    def begin_anew(self, name: str) -> None:
        """Two questions: with one alone it could be a side request as well."""
        self._send(self.program.ask, "What can you do?")
        self._send(self.program.resume, "And what can you not?")
        self._note(name, 0)
        self.end = self.head

    def _send(self, arguments: Sequence[str], *more: str, **environ: str) -> None:
        place = Place(self.server.url, self.programs, self.project, self.folder / "client")
        filled = [*(each.format(session=self.session) for each in arguments), *more]
        self.session = self.program.run(place, self.agent, filled, environ) or self.session

    def fork(self) -> None:
        """The agent is forked, and the client goes on under the name of the fork."""
        parent, session, end = self.agent, self.session, self.end
        self.agent = f"{parent}-fork"
        self.server.post(f"/v1/agents/{parent}/fork", {"id": self.agent})
        self._send(self.program.fork, "And another way?")
        self._note("the fork goes on", end)
        self.agent, self.session, self.end = parent, session, end

    def compact(self) -> None:
        shorter = (self.steps[0].expected + self.end) // 2  # a compacted one is like the first
        environ = self.program.compact_environ(self.model, shorter, self.folder)
        self._send(self.program.compact, **environ)
        self._note("compaction by the client", None)
        self.end = self.head
        self.ask("question after it", "What then?")
        made = self.server.post(f"/v1/agents/{self.agent}/compact", {})
        self._note("compaction over the API", self.head, expected=made["n_tokens"])
        self._continue()

    # What is done to the server, or asked beside the client

    def title(self) -> None:
        self.server.post("/v1/chat/completions", TITLE, **{"X-Keepwarm-Agent": self.agent})
        self._note("title request", self.head, expected=self.head)

    def restart(self) -> None:
        self.server.kill()
        self.server.start()

    def rewind(self) -> None:
        """To the end of the second question; then the agent is continued from there."""
        to = next(step for step in self.steps if step.name == SECOND)
        self.server.post(f"/v1/agents/{self.agent}/rewind", {"turn": to.turns})
        self._note("rewind to the second question", to.expected, expected=to.expected)
        self._continue()

    def _continue(self) -> None:
        """With only the new message."""
        self.server.post(f"/v1/agents/{self.agent}/{self.program.api}", NEXT)
        self._note("question over the API", self.head)

    # What came of it

    def _note(self, name: str, n_before: int | None, expected: int | None = None) -> None:
        """Keep what the step has cost, and compare the agent with the conversation.

        `n_before` is the length of the conversation that goes on; 0: a new one; None: not known.
        `expected` is that of the head afterwards, if it is not that of the last prompt with its
        answer.
        """
        costs = list(_costs(self.server.asked(), n_before))
        main = [cost.asked for cost in costs if not cost.is_side]
        self.head = main[-1].end if expected is None else expected
        shown = self.server.settle(self.agent, self.head)
        turns, branches = len(shown["turns"]), len(shown["branches"])
        found = (shown["n_tokens"], self.head, turns, branches)
        self.steps.append(Step(name, self.agent, costs, *found))


def _costs(requests: Sequence[Asked], n_before: int | None) -> Iterator[Cost]:
    longest = max((n_before or 0, *(asked.prompt for asked in requests)))
    for asked in requests:
        is_side = asked.prompt < SIDE * longest
        goes_on = not is_side and n_before and n_before <= asked.prompt
        yield Cost(asked, is_side, asked.prompt - n_before if goes_on and n_before else None)
        if not is_side and n_before is not None:
            n_before = asked.end
