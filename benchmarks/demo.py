"""Three agents share a handbook, and their process is killed and restarted:

    python -m benchmarks.demo        # or make demo; about two minutes

Every turn is run twice, with the cache off and on. Where both prompts have the same tokens the
answers must be equal. An answer sent back unchanged would keep the tokens it was generated as with
the cache on, and be tokenised again with it off, so answers are sent back without their last word.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from rich.console import Console

from keepwarm import config
from keepwarm.errors import EngineFailed, KeepwarmError

if TYPE_CHECKING:
    from keepwarm.cache.store import Store
    from keepwarm.engine.engine import Engine

HANDBOOK = """You are one of three colleagues who look after the lighthouse at Grey Point. This
handbook is the same for all of you; read it before you answer, and answer in one short sentence.

The lamp. It is lit one hour before sunset and put out one hour after sunrise. It turns once in
twelve seconds and shows two white flashes. If a flash is missed, the spare lamp is swung in within
four minutes, and the time is written into the log with a reason. The lens is cleaned every Monday
with soft water and linen, never with spirit, and nobody touches the brass ring with bare hands.

The horn. It sounds when the far buoy cannot be seen, one blast of three seconds every half minute.
Its air is pumped by the small engine in the cellar, which wants oil after every ten hours and rest
after every six. When the engine rests in fog, the bell on the gallery is rung by hand.

Boats. The supply boat comes on the first and the third Thursday of a month, at high water, if the
wind is below force five. It brings oil, bread, letters and paint, and takes back empty barrels. A
boat that lands without a signal is met at the steps by two of you, never by one. Anybody who comes
out of the sea is given a blanket, tea and the bench by the stove, before any question is asked.

The log. Weather is written down every three hours: wind, sea, sight, glass. Ships are noted with
name, course and time. Words are plain, nothing is scratched out, and a mistake gets a line through
it and initials. At midnight the keeper on watch reads the page aloud and signs it.

The stores. Paint is counted in tins, oil in barrels, bread in loaves, candles one by one. When less
than a third is left, the want is written on the slate by the door, and the slate goes with the next
boat. Rope is looked over on the last day of each month, foot by foot, by somebody who did not do so
the month before."""

TURNS = {
    "keeper": (
        "You are the keeper. When is the lamp lit?",
        "What do you do if a flash is missed?",
        "The boat is back. What do you write into the log tonight?",
    ),
    "engineer": (
        "You are the engineer. How often does the small engine want oil?",
        "It is foggy and the engine rests. What now?",
        "After the break: is there oil enough for another night?",
    ),
    "clerk": (
        "You are the clerk. When does the supply boat come?",
        "How do you count the stores?",
        "What goes on the slate for the next boat?",
    ),
}
N_ANSWER = 16
TURNS_BEFORE_KILL = 2
BAR = 16  # characters that a bar may have
FIRST = 12  # characters of the first bar; all have its scale
EIGHTHS = " ▏▎▍▌▋▊▉█"
Message: TypeAlias = dict[str, str]


def demo() -> None:
    """Run three agents, kill their process, resume them; compare cold and warm answers."""
    with tempfile.TemporaryDirectory(prefix="keepwarm-demo-") as folder:
        agents = AgentProcess(config.load().model, Path(folder))
        try:
            Demo(agents, Console()).play()
        finally:
            agents.kill()


class DemoQuestion(NamedTuple):
    """One turn for the agents' process."""

    messages: Sequence[Message]
    is_cached: bool


class DemoReply(NamedTuple):
    """An answer; `first_s` is when its first text came, by the clock of whoever waits."""

    text: str
    first_s: float
    n_prompt: int
    reused: Mapping[str, int]  # tokens by tier

    @property
    def n_computed(self) -> int:
        return self.n_prompt - sum(self.reused.values())


class AgentProcess:
    """A process with an engine and a store of its own, which can be killed and started again."""

    def __init__(self, model: str, store: Path) -> None:
        self._model, self._store = model, store
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> float:
        """Start it; seconds until it answers."""
        began = time.perf_counter()
        spawning = multiprocessing.get_context("spawn")
        self._connection, theirs = spawning.Pipe()
        self._process = spawning.Process(
            target=_answer_questions, args=(theirs, self._model, self._store), daemon=True
        )
        self._process.start()
        theirs.close()
        self._receive()
        return time.perf_counter() - began

    def ask(self, question: DemoQuestion) -> DemoReply:
        began = time.perf_counter()
        self._send(question)
        self._receive()  # the first text
        first_s = time.perf_counter() - began
        text, n_prompt, reused = self._receive()
        return DemoReply(text, first_s, n_prompt, reused)

    def save(self) -> None:
        """Wait until every block is on disk."""
        self._send(None)
        self._receive()

    def _send(self, question: DemoQuestion | None) -> None:
        with suppress(BrokenPipeError):  # `_receive` says that it ended
            self._connection.send(question)

    def _receive(self) -> tuple[str, int, Mapping[str, int]]:
        try:
            received = self._connection.recv()
        except EOFError as error:
            raise EngineFailed("The process of the demo ended unexpectedly.") from error
        if isinstance(received, str):
            raise KeepwarmError(received)
        text, n_prompt, reused = received
        return text, n_prompt, reused

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


NOTHING: tuple[str, int, dict[str, int]] = ("", 0, {})


def _answer_questions(connection: Connection, model: str, path: Path) -> None:
    """In the agents' process: answer until killed. An error is sent as its sentence."""
    from keepwarm.cache.store import Store
    from keepwarm.engine.engine import Engine
    from keepwarm.models.load import load

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the demo, which kills this process
    try:
        settings = config.load(model=model, store=path / "store", remote="")
        loaded = load(model, settings)
        with Store(settings=settings) as store, Engine(loaded, store, settings=settings) as engine:
            connection.send(NOTHING)
            while True:
                _answer(connection, engine, store)
    except KeepwarmError as error:
        connection.send(str(error))


def _answer(connection: Connection, engine: Engine, store: Store) -> None:
    from keepwarm.prefix.policy import Policy
    from keepwarm.text.request import Delta, Done, Request, Sampling

    question = connection.recv()
    if question is None:
        store.flush()
        connection.send(NOTHING)
        return
    policy = Policy.READ_WRITE if question.is_cached else Policy.NO_STORE
    sampling = Sampling(max_tokens=N_ANSWER, temperature=0)
    text = ""
    for event in engine.submit(Request(question.messages, sampling=sampling, policy=policy)):
        if isinstance(event, Delta) and event.text:
            if not text:
                connection.send(NOTHING)
            text += event.text
        if isinstance(event, Done):
            if not text:
                connection.send(NOTHING)
            connection.send((text, event.usage.prompt_tokens, event.receipt.reused))


class DemoTurn(NamedTuple):
    agent: str
    number: int
    cold: DemoReply
    warm: DemoReply

    @property
    def is_comparable(self) -> bool:
        return self.cold.n_prompt == self.warm.n_prompt

    @property
    def differs(self) -> bool:
        return self.is_comparable and self.cold.text != self.warm.text

    @property
    def verdict(self) -> str:
        if not self.is_comparable:
            return "other tokens"
        return "DIFFERENT ANSWER" if self.differs else "same"


@dataclass
class Demo:
    """Runs all turns and draws them on a console."""

    agents: AgentProcess
    console: Console
    turns: list[DemoTurn] = field(default_factory=list)
    _history: dict[str, list[Message]] = field(default_factory=dict)

    def play(self) -> None:
        began = time.perf_counter()
        self._start("A process with three agents starts.")
        for number in range(TURNS_BEFORE_KILL):
            self._round(number)
        self.agents.save()
        self.agents.kill()
        self._start("The process was killed (kill -9) and restarts.")
        self._round(TURNS_BEFORE_KILL)
        self._sum_up(time.perf_counter() - began)
        if any(turn.differs for turn in self.turns):
            raise EngineFailed("An answer with the cache differs from the one without it.")

    def _start(self, sentence: str) -> None:
        with self.console.status(sentence):
            seconds = self.agents.start()
        self.console.print(f"\n[bold]{sentence}[/bold] Ready after {seconds:.1f} s.\n")

    def _round(self, number: int) -> None:
        for agent, questions in TURNS.items():
            with self.console.status(f"{agent}, turn {number + 1}"):
                turn = self._turn(agent, number, questions[number])
            self.turns.append(turn)
            for line in lines(turn, self._character_s):
                self.console.print(line, highlight=False)

    def _turn(self, agent: str, number: int, question: str) -> DemoTurn:
        """Ask with the cache off and on; the second answer continues the conversation."""
        before = self._history.get(agent, [{"role": "system", "content": HANDBOOK}])
        messages = [*before, {"role": "user", "content": question}]
        cold = self.agents.ask(DemoQuestion(messages, is_cached=False))
        warm = self.agents.ask(DemoQuestion(messages, is_cached=True))
        self._history[agent] = [*messages, {"role": "assistant", "content": cut_off(warm.text)}]
        return DemoTurn(agent, number + 1, cold, warm)

    @property
    def _character_s(self) -> float:
        """Seconds of one character of a bar, the same for all turns."""
        return self.turns[0].cold.first_s / FIRST

    def _sum_up(self, seconds: float) -> None:
        cold = sum(turn.cold.first_s for turn in self.turns)
        warm = sum(turn.warm.first_s for turn in self.turns)
        n_prompt = sum(turn.warm.n_prompt for turn in self.turns)
        n_prefilled = sum(turn.warm.n_computed for turn in self.turns)
        after = [turn for turn in self.turns if turn.number > TURNS_BEFORE_KILL]
        self.console.print(
            f"\nTime to first token, all turns: {cold:.1f} s without the cache, {warm:.1f} s "
            f"with it, {cold / warm:.1f} times faster.\n"
            f"Prompt tokens prefilled: {n_prefilled:,} of {n_prompt:,}; after the kill "
            f"{sum(turn.warm.n_computed for turn in after):,} of "
            f"{sum(turn.warm.n_prompt for turn in after):,}.\n"
            f"{comparison(self.turns)}\nTotal time: {seconds:.0f} s.",
            highlight=False,
        )


def cut_off(answer: str) -> str:
    """The answer without its last word, so that it is tokenised the same way cache on or off."""
    return f"{answer.rpartition(' ')[0] or answer} ..."


def lines(turn: DemoTurn, character_s: float) -> Iterator[str]:
    """Two lines: cache off, cache on."""
    name = f"{turn.agent} {turn.number}"
    cold, warm = turn.cold, turn.warm
    yield f"{name:<11} off [dim]{bar(cold.first_s / character_s)}[/dim] {_summary(cold)}"
    yield f"{'':<11} on  {bar(warm.first_s / character_s)} {_summary(warm)}, {turn.verdict}"


def comparison(turns: Sequence[DemoTurn]) -> str:
    """How many answers were compared, and how many differ."""
    n_compared = sum(turn.is_comparable for turn in turns)
    n_differ = sum(turn.differs for turn in turns)
    verdict = f"{n_differ} differ" if n_differ else "identical"
    how_many = f"{n_compared} of {len(turns)}"
    return f"Answers: {how_many} compared with and without the cache, {verdict}."


def bar(n_characters: float) -> str:
    """To an eighth of a character, and not less; an arrow ends what does not fit."""
    if n_characters > BAR:
        return "█" * (BAR - 1) + "→"
    n_full, eighths = divmod(max(1, round(8 * n_characters)), 8)
    return ("█" * n_full + EIGHTHS[eighths].strip()).ljust(BAR)


def _summary(reply: DemoReply) -> str:
    tiers = " and ".join(tier for tier, n in reply.reused.items() if n)
    rest = f", rest {tiers}" if tiers else ""
    return f"{reply.first_s:6.2f} s {reply.n_computed:,} of {reply.n_prompt:,} new{rest}"


if __name__ == "__main__":
    demo()
