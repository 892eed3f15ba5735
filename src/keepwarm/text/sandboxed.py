"""Rendering, and trying out grammars, in the sandbox process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from keepwarm.errors import BadInput, TimedOut
from keepwarm.prefix.policy import Policy
from keepwarm.text.grammar import Grammars
from keepwarm.text.past_answers import KnownSpan, Splicer, StoredAnswers
from keepwarm.text.prompt import Prompter, RenderedPrompt
from keepwarm.text.prompt_limits import PromptLimits
from keepwarm.text.request import Request
from keepwarm.text.sandbox.deadline import PrepareDeadline
from keepwarm.text.sandbox.process import ProcessGone, SandboxProcess
from keepwarm.text.sandbox.worker import Channel
from keepwarm.text.template import Template
from keepwarm.text.tokenize_incremental import TextOwner, TokenCache, Tokens
from keepwarm.text.tools import CallMarkers

RENDER_CPU_S = 60.0
GRAMMAR_CPU_S = 1.0
MODULES = (__name__, "transformers")  # what takes long to import; transformers is of the tokenizer
_FIRST = Request(messages=[{"role": "user", "content": "Hi"}], policy=Policy.NO_STORE)
NAMES = (
    *("has_chat_template", "has_thinking", "think_start", "think_end", "eos_token_ids"),
    *("has_tool_calling", "tool_call_start", "tool_call_end"),
)


def new_process() -> SandboxProcess:
    """A process for some model. Start it before that is loaded: its imports take as long."""
    return SandboxProcess(*MODULES)


class _Renderer(NamedTuple):
    prompter: Prompter
    splicer: _AskingSplicer
    known: _AskingTokenCache
    grammars: Grammars

    def load(self) -> None:
        """Read the vocabulary, which only grammars need."""
        self.grammars.load()


class _RenderTask(NamedTuple):
    request: Request
    has_stored: bool
    limits: PromptLimits | None
    wants_cuts: bool


@dataclass(frozen=True)
class SandboxRecipe:
    """What the process needs to render a model's prompts as the server does."""

    tokenizer: Any
    template: Template
    call_markers: CallMarkers
    raw_special_tokens: bool
    n_vocab: int
    stop_tokens: Collection[int]
    stable_first: str = "known"

    def portable(self) -> SandboxRecipe | None:
        """The same without MLX; None if it needs that."""
        plain = PlainTokenizer.of(self.tokenizer)
        if plain is None:
            return None
        return replace(self, tokenizer=plain)

    def build(self) -> _Renderer:
        splicer = _AskingSplicer(self.tokenizer, self.template, n_vocab=self.n_vocab)
        known = _AskingTokenCache()
        prompter = Prompter(
            *(self.tokenizer, self.template, splicer, self.call_markers),
            known=known,
            raw_special_tokens=self.raw_special_tokens,
            stable_first=self.stable_first,
        )
        with suppress(BadInput):
            prompter.render(_FIRST)  # compiles the template, which every fork would do
        grammars = Grammars(self.tokenizer, self.n_vocab, self.stop_tokens)
        return _Renderer(prompter, splicer, known, grammars)


class _AskingSplicer(Splicer):
    """Asks the server, which remembers the answers."""

    channel: Channel

    def remembered(self, tenant: str, text: str) -> list[KnownSpan]:
        found: list[KnownSpan] = self.channel.ask("remembered", tenant, text)
        return found

    def remember(
        self,
        tenant: str,
        text: str,
        tokens: Sequence[int],
        generated: Sequence[int],
        before: Sequence[KnownSpan],
    ) -> KnownSpan | None:
        span: KnownSpan | None = self.channel.ask(
            "remember", tenant, text, tokens, generated, before
        )
        return span

    def stored(self) -> StoredAnswers:
        ask = self.channel.ask
        return StoredAnswers(partial(ask, "follow"), partial(ask, "elsewhere"))


class _AskingTokenCache(TokenCache):
    """Asks the server, which knows what was tokenised."""

    channel: Channel

    def find(self, owner: TextOwner, texts: Sequence[str]) -> list[Tokens | None]:
        found: list[Tokens | None] = self.channel.ask("find", owner, texts)
        return found

    def keep(self, owner: TextOwner, found: Mapping[str, Tokens]) -> None:
        self.channel.ask("keep", owner, found)


class Sandbox:
    """Does what is heavy in a process, and leaves no trace of it here. Thread-safe. Close it."""

    def __init__(self, process: SandboxProcess, splicer: Splicer, known: TokenCache) -> None:
        self._process = process
        self._answers: Mapping[str, Callable[..., Any]] = {
            "remembered": splicer.remembered,
            "remember": splicer.remember,
            "find": known.find,
            "keep": known.keep,
        }

    @classmethod
    def of(
        cls, process: SandboxProcess, recipe: SandboxRecipe, splicer: Splicer, known: TokenCache
    ) -> Sandbox | None:
        """None, and an end of the process, for a tokenizer that needs MLX."""
        if portable := recipe.portable():
            return cls(process.give(portable), splicer, known)
        process.close()
        return None

    def wait_until_ready(self) -> None:
        """So that the first request does not wait for it; one that fails is of no use to any."""
        with suppress(ProcessGone):
            self._process.wait_until_ready(PrepareDeadline())

    def load(self) -> None:
        """Have it read the vocabulary, before the next grammar is tried out."""
        self._process.load()

    def render(
        self,
        request: Request,
        stored: StoredAnswers | None,
        limits: PromptLimits | None,
        deadline: PrepareDeadline,
        *,
        wants_cuts: bool,
    ) -> RenderedPrompt:
        def reply(what: str, *arguments: Any) -> Any:
            if stored is not None and what in ("follow", "elsewhere"):
                return list(getattr(stored, what)(*arguments))
            return self._answers[what](*arguments)

        task = _RenderTask(request, stored is not None, limits, wants_cuts)
        too_long = TimedOut(
            f"The prompt takes more than {RENDER_CPU_S:g} s to prepare; send a shorter one."
        )
        found: RenderedPrompt = self._process.run(
            _render,
            task,
            deadline=deadline,
            cpu_s=RENDER_CPU_S,
            too_long=too_long,
            reply=reply,
        )
        return found

    def try_grammar(self, grammar: str, deadline: PrepareDeadline) -> None:
        """Raise BadInput for a grammar that cannot be compiled, or takes too long."""
        too_long = BadInput(
            f"The answer's format takes more than {GRAMMAR_CPU_S:g} s to compile; simplify it."
        )
        self._process.run(
            _try_grammar, grammar, deadline=deadline, cpu_s=GRAMMAR_CPU_S, too_long=too_long
        )

    def close(self) -> None:
        self._process.close()


def _render(renderer: _Renderer, channel: Channel, task: _RenderTask) -> RenderedPrompt:
    renderer.splicer.channel = renderer.known.channel = channel
    stored = renderer.splicer.stored() if task.has_stored else None
    prompt = renderer.prompter.render(task.request, stored, task.limits)
    return prompt.rendered(wants_cuts=task.wants_cuts)


def _try_grammar(renderer: _Renderer, _channel: Channel, grammar: str) -> None:
    renderer.grammars.compile_text(grammar)


class PlainTokenizer:
    """What rendering needs of mlx-lm's TokenizerWrapper; the rest is the inner tokenizer's."""

    def __init__(self, inner: Any, thinking_option: str, values: dict[str, Any]) -> None:
        self._inner = inner
        self._thinking_option = thinking_option
        self.__dict__.update(values)

    @classmethod
    def of(cls, wrapper: Any) -> PlainTokenizer | None:
        """None if mlx-lm itself renders the prompts of this model."""
        if wrapper._chat_template is not None:
            return None
        values = {name: getattr(wrapper, name) for name in NAMES}
        return cls(wrapper._tokenizer, wrapper._thinking_kwarg, values)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        """As TokenizerWrapper does; tests/contract compares them."""
        if "enable_thinking" in options:
            options[self._thinking_option] = options.pop("enable_thinking")
        options.setdefault(self._thinking_option, self.__dict__["has_thinking"])
        return self._inner.apply_chat_template(*arguments, **options, return_dict=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":  # not there while it is unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)
