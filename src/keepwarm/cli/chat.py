"""`keepwarm chat`: a conversation in the terminal; every turn reads only what is new."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from keepwarm.cli.options import (
    AgentId,
    KVBits,
    MaxTokens,
    ModelName,
    NoCache,
    Seed,
    SystemFile,
    Temperature,
    checked,
    live_cache,
    opening,
    settings_for,
)
from keepwarm.errors import BadInput, KeepwarmError

if TYPE_CHECKING:
    from keepwarm.config import Settings
    from keepwarm.engine.generate import Generation, LiveCache, Usage
    from keepwarm.engine.model import Model

HELP = "Ctrl-C stops an answer, /clear starts over, /exit or Ctrl-D leaves."


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
    """Talk with a model in the terminal."""
    from keepwarm.engine.model import load

    first = opening(system)
    settings = settings_for(model, max_tokens, temperature, seed)
    loaded = load(settings.model, settings)
    _note(f"{loaded.name}. {HELP}")
    with live_cache(loaded, settings, kv_bits, no_cache, agent) as cache:
        talk = Conversation(loaded, cache, first, settings, seed)
        for line in _lines():
            _obey(talk, line)


def _obey(talk: Conversation, line: str) -> None:
    """A command, or something to answer."""
    if line == "/clear":
        talk.clear()
        _note("Forgotten; a new conversation.")
    elif line.startswith("/"):
        _note(f"There is no {line.split(maxsplit=1)[0]}. {HELP}")
    else:
        _turn(talk, line)


class Conversation:
    """The messages so far and the live cache of what the model has read of them."""

    def __init__(
        self,
        model: Model,
        cache: LiveCache,
        opening: list[dict[str, str]],
        settings: Settings,
        seed: int | None,
    ) -> None:
        self._model = model
        self._opening = opening
        self._settings = settings
        self._seed = seed
        self._cache = cache
        self.messages = list(opening)

    def ask(self, text: str, should_stop: Callable[[], bool]) -> Generation:
        """Start the answer to this; `keep` it when it has ended."""
        from keepwarm.engine.generate import generate
        from keepwarm.engine.prompt import render

        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = render(self._model.tokenizer, messages)
        return generate(
            self._model,
            prompt.tokens,
            cache=self._cache,
            cuts=prompt.cuts,
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            seed=self._seed,
            should_stop=should_stop,
        )

    def keep(self, text: str, answer: str) -> None:
        """Add a turn to the history."""
        self.messages.append({"role": "user", "content": text})
        self.messages.append({"role": "assistant", "content": answer})

    def clear(self) -> None:
        """Forget the turns. The cache stays: the next prompt takes of it what still serves."""
        self.messages = list(self._opening)


def _turn(talk: Conversation, line: str) -> None:
    """Answer one line; what was said before Ctrl-C stays, a turn that failed leaves no trace."""
    with _interruptible() as interrupted:
        try:
            _note(_summary(_answer(talk, line, interrupted)))
        except KeepwarmError as error:
            _note(f"{error} /clear starts over.")


def _answer(talk: Conversation, line: str, should_stop: Callable[[], bool]) -> Usage:
    pieces = []
    with contextlib.closing(talk.ask(checked(line), should_stop)) as generation:
        for step in generation:
            pieces.append(step.text)
            print(step.text, end="", flush=True)
        print(flush=True)
    if generation.usage.completion_tokens:
        talk.keep(line, "".join(pieces))
    return generation.usage


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C raises nothing; the function that is given tells whether it came."""
    came = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """The lines that were typed or piped in, blank ones left out, until /exit or the end."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines and remembers them

    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            _note(f"\n{HELP}")
            continue
        except UnicodeDecodeError as error:
            raise BadInput("Standard input is not UTF-8 text; convert it.") from error
        if line == "/exit":
            return
        if line:
            yield line


def _summary(usage: Usage) -> str:
    return (
        f"{usage.completion_tokens} tokens · {usage.cached_tokens} of {usage.prompt_tokens}"
        f" already warm · {usage.tokens_per_second} tok/s"
    )


def _note(text: str) -> None:
    """A dim line beside the conversation; standard output holds the answers alone."""
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="dim", markup=False)
