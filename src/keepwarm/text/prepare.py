"""From a request to all that the engine needs of it, worked out on the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from keepwarm.errors import BadInput, ContextTooLong
from keepwarm.models.load import Model
from keepwarm.prefix.ledger import Recent
from keepwarm.text.grammar import GrammarMatcher, Grammars
from keepwarm.text.lark import led
from keepwarm.text.parsing import NORMAL, REASONING, Markup
from keepwarm.text.past_answers import Continuations, Splicer
from keepwarm.text.prompt import Prompt, Prompter
from keepwarm.text.request import Format, Miss, Request, Sampling
from keepwarm.text.sampling_rules import check
from keepwarm.text.template import Template
from keepwarm.text.tool_grammar import call_grammar, callless_grammar
from keepwarm.text.tools import CallReader, offer

MAX_CHOICES = 16


@dataclass(frozen=True)
class Prepared:
    """A request as tokens, and how its answer is to be chosen and read."""

    request: Request
    rendering: Prompt
    sampling: Sampling
    room: int  # answer tokens, at most
    n_vocab: int
    stop_tokens: Collection[int]
    markup: Markup
    opening: str  # the segment in which the answer begins
    start: GrammarMatcher | None
    explain: Callable[[int], Miss | None]  # why no more than so many tokens were known

    @property
    def tokens(self) -> list[int]:
        return self.rendering.tokens

    @property
    def cuts(self) -> list[int]:
        return self.rendering.cuts

    @property
    def spliced(self) -> int:
        return self.rendering.spliced

    @property
    def marks(self) -> list[tuple[int, float | None]]:
        """Where the prompt is to be kept up to, in tokens, and for how long."""
        places = [(self.rendering.end_of(m.message), m.ttl_s) for m in self.request.marks]
        return [(place, ttl_s) for place, ttl_s in places if place]

    def matcher(self) -> GrammarMatcher | None:
        return None if self.start is None else self.start.copy()

    def calls(self) -> CallReader | None:
        if not self.request.tools or self.request.tool_choice.mode == "none":
            return None
        choice = self.request.tool_choice
        return CallReader(self.markup.tools, self.request.tools, parallel=choice.parallel)


class Preparer:
    """Knows one model's tokenizer, template and vocabulary. Any thread may ask."""

    def __init__(self, model: Model, n_vocab: int, recent: Recent) -> None:
        tokenizer = model.tokenizer
        self._model = model
        self._n_vocab = n_vocab
        self._recent = recent
        self._stop_tokens = frozenset(tokenizer.eos_token_ids)
        self.template = Template.of(tokenizer)
        self.splicer = Splicer(tokenizer, self.template)
        self.markup = Markup.of(tokenizer)
        self._prompter = Prompter(
            tokenizer, self.template, self.splicer, partial(offer, self.markup.tools)
        )
        self._grammars = Grammars(tokenizer, n_vocab, self._stop_tokens)

    def prepare(self, request: Request, stored: Continuations | None = None) -> Prepared:
        """Render and check; BadInput says what is wrong with a request.

        `stored` gives what was answered before, for answers that come back.
        """
        check(request.sampling, self._n_vocab)
        if not 1 <= request.n <= MAX_CHOICES:
            raise BadInput(f"n is {request.n}; it must be from 1 to {MAX_CHOICES}.")
        rendering = self.render(request, stored)
        thinks = request.messages is not None and rendering.opens_thinking
        sampling = request.sampling
        if _forbids_calls(request):
            sampling = _without_calls(sampling, self.markup)
        return Prepared(
            request,
            rendering,
            sampling,
            self._room(request.sampling, len(rendering.tokens)),
            self._n_vocab,
            self._stop_tokens,
            self.markup,
            REASONING if thinks else self.markup.first if request.messages else NORMAL,
            self._grammar(request, thinks),
            self._explainer(request, rendering),
        )

    def render(self, request: Request, stored: Continuations | None = None) -> Prompt:
        return self._prompter.render(request, stored)

    def _room(self, sampling: Sampling, n_prompt: int) -> int:
        if not n_prompt:
            raise BadInput("The prompt is empty; say something.")
        left = self._model.n_context - n_prompt
        if left < 1:
            raise ContextTooLong(
                f"The prompt is {n_prompt:,} tokens long and {self._model.name} reads at most"
                f" {self._model.n_context - 1:,}; shorten it."
            )
        return left if sampling.max_tokens is None else min(sampling.max_tokens, left)

    def _grammar(self, request: Request, thinks: bool) -> GrammarMatcher | None:
        after = (self._model.tokenizer.think_end_tokens if thinks else None) or ()
        calls = call_grammar(request.tools, request.tool_choice, self.markup)
        if calls is not None:
            return self._grammars.compile(Format(grammar=calls), after)
        if request.format is not None:
            return self._grammars.compile(request.format, after, self._lead(request, bool(after)))
        callless = callless_grammar(self.markup) if _forbids_calls(request) else None
        return self._grammars.compile(Format(grammar=callless))

    def _lead(self, request: Request, thinks: bool) -> str:
        """What the model writes before its answer, where neither prompt nor thoughts did."""
        if request.messages is None or thinks:
            return ""
        lead = self.markup.lead
        silent = lead._replace(think="", thought="")
        return led(self._model.tokenizer, silent if request.thinking is False else lead)

    def _explainer(self, request: Request, rendering: Prompt) -> Callable[[int], Miss | None]:
        whose = (request.kv, request.tenant)

        def explain(n_known: int) -> Miss | None:
            if not request.policy.reads:
                return Miss(0, None, "disabled")
            why = self._recent.explain(whose, rendering.tokens, (), n_known)
            if why is None:
                return None
            return Miss(why.position, rendering.message_at(n_known), why.reason, why.nearest)

        return explain


def _forbids_calls(request: Request) -> bool:
    """Tools stay in the prompt, whose beginning others share; the mark of a call is forbidden."""
    return bool(request.tools) and request.tool_choice.mode == "none"


def _without_calls(sampling: Sampling, markup: Markup) -> Sampling:
    """Where the mark is one token; a grammar forbids one that is text."""
    mark = markup.tokenizer.get_added_vocab().get(markup.tools.start)
    forbidden = {} if mark is None else {mark: -100.0}
    return replace(sampling, logit_bias={**sampling.logit_bias, **forbidden})
