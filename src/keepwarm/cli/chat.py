"""`keepwarm chat`: a conversation in the terminal; each turn prefills only new tokens."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from keepwarm import config
from keepwarm.cli.options import (
    AgentId,
    KVBits,
    MaxTokens,
    ModelName,
    NoCache,
    Seed,
    SystemFile,
    Temperature,
    check_prompt,
    make_request,
    open_engine,
    print_events,
    print_note,
    system_messages,
)
from keepwarm.errors import BadInput, Cancelled, KeepwarmError

if TYPE_CHECKING:
    from keepwarm.engine.answer import Answer
    from keepwarm.engine.engine import Engine
    from keepwarm.text.request import Event, Receipt, Request, Usage

HELP = "Ctrl-C stops an answer, /clear starts over, /exit or Ctrl-D quits."
COMMANDS = """\
/clear  start over; the system prompt stays
/help   show this
/exit   quit, as Ctrl-D does
Ctrl-C stops an answer; what it said so far stays in the conversation."""


def chat(
    *,
    model: ModelName = None,
    system: SystemFile = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    kv_bits: KVBits = None,
    no_cache: NoCache = False,
    agent: AgentId = None,
) -> None:
    """Chat with a model in the terminal."""
    first = system_messages(system)
    settings = config.load(
        model=model, max_tokens=max_tokens, temperature=temperature, kv_bits=kv_bits
    )
    template = make_request(settings, seed, no_cache, agent)
    with open_engine(settings, template) as engine:
        n_known = _n_turns(engine, agent)
        history = ChatHistory(engine, template, first, continues=n_known > 0)
        known = f" {agent} has {n_known} turns, which are continued." if n_known else ""
        print_note(f"{engine.model.name}.{known} {HELP} /help lists the commands.")
        for line in _input_lines():
            _handle_line(history, line)


def _n_turns(engine: Engine, agent: str | None) -> int:
    """Turns of an agent in the store; 0 if it is new."""
    if agent is None or not engine.knows_agent(agent):
        return 0
    return len(engine.store.on_disk.agents.show(agent).turns)


def _stored_system(engine: Engine, template: Request) -> list[dict[str, str]]:
    """The system prompt with which an agent's conversation begins."""
    from keepwarm.text.request import SYSTEM_ROLES

    turn = engine.store.on_disk.latest_turn(str(template.agent)).turn
    first = turn.messages[:1] if turn else ()
    return [dict(each) for each in first if each["role"] in SYSTEM_ROLES]


def _handle_line(history: ChatHistory, line: str) -> None:
    """Run a command, or answer a prompt."""
    if line == "/clear":
        history.clear()
        print_note("History cleared.")
    elif line == "/help":
        print_note(COMMANDS)
    elif line.startswith("/"):
        print_note(f"Unknown command {line.split(maxsplit=1)[0]}; /help lists them.")
    else:
        _turn(history, line)


class ChatAnswer:
    """One answer, collected from its events."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.n_tokens = 0
        self.receipt: Receipt | None = None  # None until the answer starts
        self.usage: Usage | None = None  # None if it was stopped

    def add(self, event: Event) -> None:
        from keepwarm.text.request import Delta, Done, Finished, Started

        if isinstance(event, Started):
            self.receipt = event.receipt
        if isinstance(event, Delta):
            self.text += event.text
            self.reasoning += event.reasoning
        if isinstance(event, Delta | Finished):
            self.n_tokens += len(event.tokens)
        if isinstance(event, Done):
            self.usage = event.usage

    @property
    def message(self) -> dict[str, str]:
        message = {"role": "assistant", "content": self.text}
        return message | ({"reasoning_content": self.reasoning} if self.reasoning else {})

    @property
    def summary(self) -> str:
        """Tokens, reuse and speed in one line."""
        if self.receipt is None:
            return "Stopped before the first token."
        warm = f"{self.receipt.cached_tokens} of {self.receipt.prompt_tokens} already warm"
        end = f"{self.usage.tokens_per_second} tok/s" if self.usage else "stopped"
        return f"{self.n_tokens} tokens · {warm} · {end}"


class ChatHistory:
    """The messages so far. The engine finds on its own which of them are cached.

    An agent that is continued has its messages in the store; here are only new ones.
    """

    def __init__(
        self,
        engine: Engine,
        template: Request,
        system: list[dict[str, str]],
        *,
        continues: bool = False,
    ) -> None:
        """Raises what would make the engine refuse every prompt, such as a long system prompt."""
        self._engine = engine
        self._template = replace(template, continues=continues)
        self._system = system or (_stored_system(engine, template) if continues else [])
        self.messages = list(system)
        engine.prepare(self._request("?"))

    def ask(self, text: str) -> Answer:
        """Start an answer; pass it to `keep` when it is complete."""
        return self._engine.submit(self._request(text))

    def keep(self, text: str, answer: ChatAnswer) -> None:
        """Add a turn to the history."""
        turn = [{"role": "user", "content": text}, answer.message]
        self.messages = [] if self._template.continues else [*self.messages, *turn]

    def clear(self) -> None:
        """Drop the turns. Their blocks stay cached, so the system prompt is still warm."""
        self._template = replace(self._template, continues=False)
        self.messages = list(self._system)

    def _request(self, text: str) -> Request:
        return replace(self._template, messages=[*self.messages, {"role": "user", "content": text}])


def _turn(history: ChatHistory, line: str) -> None:
    """Answer one line. A stopped answer stays in the history, a failed turn does not."""
    with _interruptible() as interrupted:
        try:
            answer = _read(history.ask(check_prompt(line)), interrupted)
        except KeepwarmError as error:
            print_note(f"{error} /clear starts over.")
            return
    if answer.n_tokens:
        history.keep(line, answer)
    print_note(answer.summary)


def _read(stream: Answer, interrupted: Callable[[], bool]) -> ChatAnswer:
    answer = ChatAnswer()
    try:
        for event in print_events(stream):
            answer.add(event)
            if interrupted():
                stream.cancel()
    except Cancelled:
        pass
    finally:
        print(flush=True)
    return answer


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C raises nothing; the yielded function says whether it was pressed."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _input_lines() -> Iterator[str]:
    """Typed or piped lines without blank ones, until /exit or end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() line editing and history

    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, OSError):  # the terminal may be gone
            return
        except KeyboardInterrupt:
            print_note(f"\n{HELP}")
            continue
        except UnicodeDecodeError as error:
            raise BadInput("Standard input is not UTF-8 text; convert it.") from error
        if line == "/exit":
            return
        if line:
            yield line
