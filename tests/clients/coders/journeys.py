"""`python -m tests.clients.coders.journeys`: what every published coding agent has computed anew.

A question with a tool, the conversation resumed by a new process and after a kill of the server,
new sessions in the same project and in another, and a conversation that outgrew the context; with
a template that writes no tools and with one of Qwen's kind.

Every row is written as soon as it is measured. Without names only those are measured that the file
does not have yet; a client that is named is measured anew.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.requests.measure import describe_machine

from tests.clients.coders.model import FILE, NOTE, PLAIN, SAID, TEMPLATE, write_model
from tests.clients.coders.page import goes_on, journeys_table
from tests.clients.coders.programs import EVERY, Ended, Place, Program, arguments, install
from tests.clients.coders.served import Asked, Server
from tests.clients.coders.sessions import OURS, QWENS, write_project
from tests.clients.coders.walk import SIDE

QUESTIONS = (f"What does {FILE} say?", "And what else?")
LONG = f"{NOTE}\n" * 200  # 2,000 tokens, which are read from the file, twice
ROOM = 1_000  # tokens of a context behind a conversation that then grows by more
LONGER = f"{NOTE} " * 150 + "What of it?"  # 1,500 tokens
NEXT = "What now?"


KINDS = {OURS: PLAIN, QWENS: TEMPLATE}  # templates


def main() -> None:
    given = arguments("tests.clients.coders.journeys", EVERY)
    rows = Rows(given.json)
    wanted = [
        (EVERY[name], kind)
        for name in given.clients or EVERY
        for kind in KINDS
        if given.clients or not rows.has(EVERY[name], kind)
    ]
    programs = install(given.programs, [program for program, _ in wanted])
    for program, kind in wanted:
        rows.add(program, kind, _travel(program, programs, KINDS[kind]))
        sys.stdout.write(journeys_table({program.name: rows.clients[program.name]}))
        sys.stdout.flush()


class Rows:
    """What was measured, in a file if one is given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.clients: dict[str, Any] = {}
        self._read()

    def _read(self) -> None:
        if self._path and self._path.exists():
            self.clients = json.loads(self._path.read_text())["clients"]

    def has(self, program: Program, kind: str) -> bool:
        return kind in self._kinds(program)

    def add(self, program: Program, kind: str, steps: dict[str, Any]) -> None:
        self._read()  # another process may have added its own
        kinds = {**self._kinds(program), kind: steps}
        kinds = {each: kinds[each] for each in KINDS if each in kinds}
        self.clients[program.name] = {"version": program.version, "kinds": kinds}
        if self._path:
            self._path.write_text(json.dumps(self._as_json(), indent=1) + "\n")

    def _kinds(self, program: Program) -> dict[str, Any]:
        """Of the version that is installed."""
        known = self.clients.get(program.name, {"version": "", "kinds": {}})
        return known["kinds"] if known["version"] == program.version else {}

    def _as_json(self) -> dict[str, Any]:
        return {
            "command": "python -m tests.clients.coders.journeys --json docs/results/journeys.json",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": describe_machine(),
            "clients": {name: self.clients[name] for name in EVERY if name in self.clients},
        }


def _travel(program: Program, programs: Path, template: Path) -> dict[str, Any]:
    # Always the same folder: its name is in the prompts.
    folder = Path(tempfile.gettempdir(), "keepwarm-journeys", program.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return Journey(program, programs, folder, template).run()


@dataclass
class Journey:
    """One client's requests, step by step."""

    program: Program
    programs: Path
    folder: Path
    template: Path
    steps: dict[str, Any] = field(default_factory=dict)
    session: str = ""

    def __post_init__(self) -> None:
        self.project = write_project(self.folder / "project")
        called = self.program.call(self.project)
        self.model = write_model(self.folder / "model", self.program.tool, called, self.template)
        (self.folder / "server").mkdir()
        self.server = Server(self.model, self.folder / "server")

    def run(self) -> dict[str, Any]:
        self._start()
        try:
            self._talk()
            self._overflow()
        finally:
            self.server.kill()
        return self.steps

    def _start(self, context: int = 0) -> None:
        self.server.start(KEEPWARM_CONTEXT=str(context))

    def _talk(self) -> None:
        first, *_, second = self._begin()
        self._note("first", first)
        self._note("turn 2", second)
        self._note("resumed", self._asked(self.program.resume, "Is there more?")[0])
        self.server.kill()
        self._start()
        self._note("restarted", self._asked(self.program.resume, "Are you still there?")[0])
        (self.project / "new.txt").write_text("New.\n")
        self._note("same", self._asked(self.program.ask, "What can you do?")[0])
        self.project = write_project(self.folder / "elsewhere")
        self._note("other", self._asked(self.program.ask, "What can you do here?")[0])

    def _begin(self) -> list[Asked]:
        """Two requests of one process: a question and its tool's result, or two questions."""
        if self.program.in_one:
            return self._asked(self.program.in_one, said="\n".join((*QUESTIONS, "/exit", "")))
        return self._asked(self.program.ask, QUESTIONS[0])

    def _overflow(self) -> None:
        """The server's context is shorter than the client knows.

        A client that ends is asked once more, then told the context in another conversation.
        """
        long = self._read_much()
        self._note("long", long)
        n_context = long.end + ROOM
        self.server.kill()
        self._start(n_context)
        untold = {"model": str(self.model)}
        self._try("overflow", (*self.program.resume, LONGER), **untold)
        if goes_on(self.steps["overflow"]):
            return
        self._try("next", (*self.program.resume, NEXT), **untold)
        if self.program.is_told:
            self._read_much(**untold)
            self._try("told", (*self.program.resume, NEXT), n_context=n_context)

    def _read_much(self, **place: Any) -> Asked:
        """A new conversation, long by what was read from the file; its last request.

        It is read twice and changes in between: Claude Code keeps what it read last.
        """
        self.project = self.folder / "project"
        for options, line in ((self.program.ask, "One."), (self.program.resume, "Two.")):
            (self.project / FILE).write_text(f"{line}\n{LONG}")
            *_, last = self._asked(options, QUESTIONS[0], **place)
        return last

    def _try(self, step: str, options: Sequence[str], **place: Any) -> None:
        """Note what came of a question, which the client may end with an error."""
        said = ""
        try:
            self._send(options, **place)
        except Ended as error:  # opencode does so although it then answers
            said = "" if SAID in str(error) else str(error)[-600:]
        found = self.server.answered()
        asked = [asdict(each) for each in found.asked]
        self.steps[step] = {"refused": len(found.refused), "asked": asked, "said": said}

    def _asked(
        self, options: Sequence[str], *text: str, said: str = "", **place: Any
    ) -> list[Asked]:
        """The requests of one run, without the client's own side requests."""
        self._send(options, *text, said=said, **place)
        found = self.server.asked()
        longest = max(asked.prompt for asked in found)
        return [asked for asked in found if asked.prompt >= SIDE * longest]

    def _send(self, options: Sequence[str], *text: str, said: str = "", **more: Any) -> None:
        home = self.folder / "client"
        place = Place(self.server.url, self.programs, self.project, home, **more)
        filled = [*(each.format(session=self.session) for each in options), *text]
        self.session = self.program.run(place, "", filled, said=said) or self.session

    def _note(self, step: str, asked: Asked) -> None:
        self.steps[step] = {"prompt": asked.prompt, "computed": asked.computed}


if __name__ == "__main__":
    main()
