"""`keepwarm demo`: three agents share a handbook, and the server is killed and restarted.

Every turn is sent twice to the same process, with the cache off and on. Where both prompts have
the same tokens the answers must be equal. An answer sent back unchanged would keep the tokens it
was generated as with the cache on, and be tokenised again with it off, so answers are sent back
without their last word.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from keepwarm.bench.client import BenchRequest, Message, TimedReply
from keepwarm.bench.prompts import assistant, system, user
from keepwarm.bench.targets import Target
from keepwarm.errors import EngineFailed

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


class DemoTurn(NamedTuple):
    agent: str
    number: int
    cold: TimedReply
    warm: TimedReply

    @property
    def is_comparable(self) -> bool:
        return self.cold.prompt_tokens == self.warm.prompt_tokens

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
    """Runs all turns on one target and draws them on a console."""

    target: Target
    console: Console
    turns: list[DemoTurn] = field(default_factory=list)
    _history: dict[str, list[Message]] = field(default_factory=dict)

    def play(self) -> None:
        began = time.perf_counter()
        self._start("A server starts.")
        for number in range(TURNS_BEFORE_KILL):
            self._round(number)
        self.target.settle()
        self.target.kill()
        self._start("The process was killed (kill -9) and restarts.")
        self._round(TURNS_BEFORE_KILL)
        self._sum_up(time.perf_counter() - began)
        if any(turn.differs for turn in self.turns):
            raise EngineFailed("An answer with the cache differs from the one without it.")

    def _start(self, sentence: str) -> None:
        with self.console.status(sentence):
            seconds = self.target.start()
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
        asked = [*self._history.get(agent, [system(HANDBOOK)]), user(question)]
        cold = self.target.ask(BenchRequest(asked, N_ANSWER, "no-store"))
        warm = self.target.ask(BenchRequest(asked, N_ANSWER))
        self._history[agent] = [*asked, assistant(cut_off(warm.text))]
        return DemoTurn(agent, number + 1, cold, warm)

    @property
    def _character_s(self) -> float:
        """Seconds of one character of a bar, the same for all turns."""
        return self.turns[0].cold.ttft_s / FIRST

    def _sum_up(self, seconds: float) -> None:
        cold = sum(turn.cold.ttft_s for turn in self.turns)
        warm = sum(turn.warm.ttft_s for turn in self.turns)
        n_prompt = sum(turn.warm.prompt_tokens for turn in self.turns)
        n_prefilled = sum(turn.warm.recomputed for turn in self.turns)
        after = [turn for turn in self.turns if turn.number > TURNS_BEFORE_KILL]
        self.console.print(
            f"\nTime to first token, all turns: {cold:.1f} s without the cache, {warm:.1f} s "
            f"with it, {cold / warm:.1f} times less.\n"
            f"Prompt tokens prefilled: {n_prefilled:,} of {n_prompt:,}; after the kill "
            f"{sum(turn.warm.recomputed for turn in after):,} of "
            f"{sum(turn.warm.prompt_tokens for turn in after):,}.\n"
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
    yield f"{name:<11} off [dim]{bar(cold.ttft_s / character_s)}[/dim] {_summary(cold)}"
    yield f"{'':<11} on  {bar(warm.ttft_s / character_s)} {_summary(warm)}, {turn.verdict}"


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


def _summary(reply: TimedReply) -> str:
    tiers = " and ".join(tier for tier, n in reply.reused.items() if n)
    rest = f", rest {tiers}" if tiers else ""
    return f"{reply.ttft_s:6.2f} s {reply.recomputed:,} of {reply.prompt_tokens:,} new{rest}"


def play(model: str, console: Console) -> None:
    """Start a server with a temporary store and run the demo on it."""
    from keepwarm.bench.files import model_directory
    from keepwarm.bench.targets import keepwarm_server

    directory = model_directory(model)
    with tempfile.TemporaryDirectory(prefix="keepwarm-demo-") as folder:
        target = keepwarm_server(directory, Path(folder))
        try:
            Demo(target, console).play()
        finally:
            target.close()
