"""A request as the engine needs it: rendered, tokenised and checked on the caller's thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from keepwarm.errors import BadInput, ContextTooLong
from keepwarm.models.load import Model
from keepwarm.prefix.blocks import common_prefix
from keepwarm.prefix.recent import NOTHING_STORED, RecentPrompts, StoredPrefix
from keepwarm.text.detokenize import decode
from keepwarm.text.grammar import GrammarMatcher, Grammars, Trial, properties_of, required_of
from keepwarm.text.parsing import NORMAL, REASONING, Markup, Preamble
from keepwarm.text.past_answers import Splicer, StoredAnswers
from keepwarm.text.prompt import Prompt, Prompter, RenderedPrompt
from keepwarm.text.prompt_limits import PromptLimits, check_counts, is_heavy
from keepwarm.text.request import Format, Message, Miss, MissCause, Request, Sampling, Tool
from keepwarm.text.rewritten import rewritten
from keepwarm.text.sampling_rules import check_sampling
from keepwarm.text.sandbox.deadline import PrepareDeadline, PrepareStep
from keepwarm.text.sandbox.process import ProcessGone, SandboxProcess
from keepwarm.text.sandboxed import Sandbox, SandboxRecipe
from keepwarm.text.template import Template, opens_thinking, text_of
from keepwarm.text.tokenize_incremental import TokenCache
from keepwarm.text.tool_grammar import answer_grammar, call_grammar, no_call_grammar, strict_grammar
from keepwarm.text.tools import CallReader

MAX_CHOICES = 16
MAX_AGENTS = 256
MAX_KEYWORDS = 16  # of schemas, named in a receipt
MAX_LINES = 64  # of an answer
MIN_LINE = 24  # characters; shorter lines are in many texts


@dataclass(frozen=True)
class Explainer:
    """Knows why not more of one prompt was reused."""

    request: Request
    prompt: Prompt | RenderedPrompt
    recent: RecentPrompts
    is_compacted: bool  # it quotes an earlier answer

    def __call__(
        self,
        n_known: int,
        why: MissCause | None = None,
        stored: StoredPrefix = NOTHING_STORED,
    ) -> Miss | None:
        """Why no more than `n_known` tokens are reused; `why` if the caller knows.

        Else by earlier prompts: see `RecentPrompts.explain`.
        """
        if not self.request.policy.reads:
            return Miss(0, None, "disabled")
        scope, tokens = (self.request.kv, self.request.tenant), self.prompt.tokens
        found = self.recent.explain(scope, tokens, n_known, stored)
        if found is None:
            return None
        begins_anew = found.reason == "diverged" or (found.reason == "new" and not n_known)
        cause: MissCause = "compacted" if self.is_compacted and begins_anew else found.reason
        message = self.prompt.message_at(n_known)
        return Miss(n_known, message, why or cause, found.nearest)


@dataclass(frozen=True)
class PreparedRequest:
    """A request as tokens, with the rules for sampling and parsing its answer."""

    request: Request
    prompt: Prompt | RenderedPrompt
    sampling: Sampling
    max_new_tokens: int  # of one choice
    n_vocab: int
    stop_tokens: Collection[int]
    markup: Markup
    first_segment: str  # the segment in which the answer begins
    grammar: GrammarMatcher | None  # at its start; see `new_matcher`
    explain: Explainer
    stored: StoredAnswers | None = None  # where its answers are to be found again
    rewritten: Sequence[Sequence[int]] = ()  # tool results as a call would write them back

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens

    @property
    def continued(self) -> int | None:
        """Known tokens that the prompt begins with, if it continues a conversation."""
        history = self.request.history
        return None if history is None else common_prefix(history.tokens, self.tokens)

    @property
    def breakpoints(self) -> list[tuple[int, float | None]]:
        """Token positions to keep the prompt up to, each with its TTL in seconds."""
        n_kept = self.prompt.n_messages - len(self.request.messages or ())
        places = [
            (b.message + n_kept if b.message >= 0 else b.message, b.ttl_s)
            for b in self.request.breakpoints
        ]
        ends = [(self.prompt.end_of(message), ttl_s) for message, ttl_s in places]
        return [(position, ttl_s) for position, ttl_s in ends if position]

    def new_matcher(self) -> GrammarMatcher | None:
        """A matcher for one choice; None if its answer is unconstrained."""
        return None if self.grammar is None else self.grammar.copy()

    def call_reader(self) -> CallReader | None:
        """Parses tool calls; None if the answer cannot hold any."""
        if not self.request.tools or self.request.tool_choice.mode == "none":
            return None
        choice, wanted = self.request.tool_choice, self.request.format
        return CallReader(
            self.markup.tool_format,
            self.request.tools,
            parallel=choice.parallel,
            is_bound=choice.is_forced or (wanted is not None and wanted.grammar is None),
        )


class Preparer:
    """Prepares requests for one model. Thread-safe."""

    def __init__(
        self,
        model: Model,
        n_vocab: int,
        recent: RecentPrompts,
        raw_special_tokens: bool = True,
        sandbox: SandboxProcess | None = None,
        *,
        stable_first: str = "known",
    ) -> None:
        """What is heavy is done in `sandbox`, if the tokenizer can be sent; closed with this."""
        tokenizer = model.tokenizer
        self._model = model
        self._n_vocab = n_vocab
        self._recent = recent
        self._answers = LatestAnswers()
        self._stop_tokens = frozenset(tokenizer.eos_token_ids)
        self.template = Template.of(tokenizer)
        self.splicer = Splicer(tokenizer, self.template, n_vocab=n_vocab)
        self.markup = Markup.of(tokenizer, self.template)
        known = self.token_cache = TokenCache()
        self._prompter = Prompter(
            *(tokenizer, self.template, self.splicer, self.markup.tool_format),
            known=known,
            raw_special_tokens=raw_special_tokens,
            stable_first=stable_first,
        )
        self._grammars = Grammars(tokenizer, n_vocab, self._stop_tokens)
        self._limits = PromptLimits(model.name, model.n_context, tokenizer)
        recipe = SandboxRecipe(
            *(tokenizer, self.template, self.markup.tool_format.markers, raw_special_tokens),
            *(n_vocab, self._stop_tokens, stable_first),
        )
        self._sandbox = Sandbox.of(sandbox, recipe, self.splicer, known) if sandbox else None

    def prepare(
        self,
        request: Request,
        stored: StoredAnswers | None = None,
        deadline: PrepareDeadline | None = None,
        wants_cuts: bool = False,
    ) -> PreparedRequest:
        """Render and check a request; BadInput says what is wrong with it.

        `stored` looks up past answers among the stored blocks.
        """
        deadline = deadline or PrepareDeadline()
        check_sampling(request.sampling, self._n_vocab)
        if not 1 <= request.n <= MAX_CHOICES:
            raise BadInput(f"n is {request.n}; it must be from 1 to {MAX_CHOICES}.")
        self._limits.check(request)
        wants_cuts = wants_cuts or request.explain
        prompt = self._render(request, stored, self._limits, deadline, wants_cuts=wants_cuts)
        thinks = request.messages is not None and self._opens_thinking(request, prompt)
        grammar = self._grammar(request, thinks, deadline)
        request = _with_ignored_keywords(request, grammar)
        sampling = request.sampling
        if _forbids_calls(request):
            sampling = _without_calls(sampling, self.markup)
        if sampling.ignore_eos:
            known = (token for token in self._stop_tokens if token < self._n_vocab)
            sampling = _forbid(sampling, known)
        return PreparedRequest(
            request,
            prompt,
            sampling,
            self._max_new_tokens(request.sampling, len(prompt.tokens)),
            self._n_vocab,
            self._stop_tokens,
            self.markup if request.messages is not None else self.markup.raw,
            REASONING if thinks else self._first_segment(request),
            grammar,
            Explainer(
                request, prompt, self._recent, request.explain and self._answers.are_quoted(request)
            ),
            stored,
        )

    def with_rewritten(self, prepared: PreparedRequest) -> PreparedRequest:
        """The same, with tool results as a call would write them back.

        Not those that the tokenizer cannot read, or with tokens that the model does not have.
        """
        request = prepared.request
        if not request.tools or request.messages is None:
            return prepared
        past = request.history.turn if request.history else None
        messages = [*(past.messages if past else ()), *request.messages]
        texts = rewritten(messages, as_json=self.markup.tool_format.header is not None)
        found: list[Sequence[int]] = []
        for text in texts:
            with suppress(BadInput):
                tokens = self._prompter.tokens_of(request, text)
                self._check_tokens(tokens)
                found.append(tokens)
        return replace(prepared, rewritten=found)

    def _opens_thinking(self, request: Request, prompt: Prompt | RenderedPrompt) -> bool:
        if not (request.partial_answer and request.messages):
            return prompt.opens_thinking
        return opens_thinking(self._model.tokenizer, text_of(request.messages[-1]))

    def _first_segment(self, request: Request) -> str:
        """Raw prompts and answers that are begun already have no header."""
        is_new = request.messages is not None and not request.partial_answer
        return self.markup.first_segment if is_new else NORMAL

    def n_tokens(
        self,
        request: Request,
        stored: StoredAnswers | None = None,
        deadline: PrepareDeadline | None = None,
    ) -> int:
        """The length of a prompt, also of one that is too long for the model."""
        return len(self.tokens(request, stored, deadline or PrepareDeadline()))

    def tokens(
        self, request: Request, stored: StoredAnswers | None, deadline: PrepareDeadline
    ) -> Sequence[int]:
        """The same for its tokens."""
        return self._render(request, stored, None, deadline, wants_cuts=False).tokens

    def remember(
        self,
        prepared: PreparedRequest,
        tokens: Sequence[int],
        is_wanted: Callable[[], bool] | None,
    ) -> Future[None] | None:
        """Remember an answer, the end of these tokens, for a client that sends it back as text, to
        this machine or, if it is wanted there, to another; done when that is told. `is_wanted`:
        None if no other machine is told, because no agent would have it deleted there.

        Of a conversation that was continued it is found among the stored blocks.
        """
        prompt, generated = prepared.prompt, tokens[len(prepared.tokens) :]
        if prepared.request.agent is not None:
            words = [token for token in generated if token not in self._stop_tokens]
            self._answers.remember(prepared.request, decode(self._model.tokenizer, words))
        if prepared.request.messages is None or not generated or prompt.n_before:
            return None
        made = (prepared.request.tenant, prompt.text, prompt.tokens, generated, prompt.spans)
        span, stored = self.splicer.remember(*made), prepared.stored
        if span is None or stored is None or is_wanted is None:
            return None
        if not prepared.request.policy.to_disk:
            return None
        return stored.share(prompt.text, [*prompt.spans, span], tokens, is_wanted)

    def forget(self) -> None:
        """Forget all texts: answers, and tokens of what was prepared."""
        self.splicer.clear()
        self.token_cache.clear()
        self._answers.clear()

    def load(self) -> bool:
        """Read the vocabulary for what the first structured answer needs of it; False if it was
        before.

        It keeps all threads waiting: half a second, or longer for a large vocabulary.
        """
        if self._sandbox is not None:
            self._sandbox.load()  # meanwhile
        return self._grammars.load()

    def wait_until_ready(self) -> None:
        """Return once long prompts can be prepared."""
        self._limits.load()
        if self._sandbox is not None:
            self._sandbox.wait_until_ready()

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def _render(
        self,
        request: Request,
        stored: StoredAnswers | None,
        limits: PromptLimits | None,
        deadline: PrepareDeadline,
        *,
        wants_cuts: bool,
    ) -> Prompt | RenderedPrompt:
        check_counts(request)
        deadline.begin(PrepareStep.PROMPT)
        deadline.check()
        prompt: Prompt | RenderedPrompt | None = None
        if self._sandbox is not None and is_heavy(request):
            with suppress(ProcessGone):  # then it is done here
                prompt = self._sandbox.render(
                    request, stored, limits, deadline, wants_cuts=wants_cuts
                )
        if prompt is None:
            prompt = self._prompter.render(request, stored, limits)
        deadline.check()
        self._check_tokens(prompt.tokens)
        return prompt

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        """The model's vocabulary counts: it generates ids that its tokenizer does not have."""
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self._n_vocab:  # MLX would read past the end of the embeddings
                raise BadInput(
                    f"The prompt contains the token {token}, and the model's tokens are 0 to "
                    f"{self._n_vocab - 1}; send ids of this model."
                )

    def _max_new_tokens(self, sampling: Sampling, n_prompt: int) -> int:
        if not n_prompt:
            raise BadInput("The prompt is empty; send some text.")
        left = self._model.n_context - n_prompt
        if left < 1:
            raise ContextTooLong(
                f"The prompt is {n_prompt:,} tokens long and {self._model.name} reads at most"
                f" {self._model.n_context - 1:,}; shorten it.",
                *(n_prompt, self._model.n_context - 1),
            )
        return left if sampling.max_tokens is None else min(sampling.max_tokens, left)

    def _grammar(
        self, request: Request, thinks: bool, deadline: PrepareDeadline
    ) -> GrammarMatcher | None:
        deadline.begin(PrepareStep.FORMAT)
        compile_ = partial(
            self._grammars.compile, tenant=request.tenant, trial=self._trial(deadline)
        )
        after = (self._model.tokenizer.think_end_tokens if thinks else None) or ()
        calls = call_grammar(request.tools, request.tool_choice, self.markup)
        if calls is not None:
            return compile_(Format(grammar=calls), after)
        if request.format is not None:
            for tools in _binding_less(request.tools):
                around = self._around_answer(request, request.format, tools, bool(after))
                with suppress(BadInput):
                    return compile_(request.format, after, around)
            alone = self._around_answer(request, request.format, (), bool(after))
            return compile_(request.format, after, alone)
        if _forbids_calls(request):
            return compile_(Format(grammar=no_call_grammar(self.markup)))
        with suppress(BadInput):  # the same of strict tools: their calls are free
            return compile_(Format(grammar=strict_grammar(request.tools, self.markup)))
        return None

    def _trial(self, deadline: PrepareDeadline) -> Trial:
        def trial(grammar: str) -> None:
            if self.load():  # which is not the request's time
                deadline.begin_again()
            with suppress(ProcessGone):
                if self._sandbox is not None:
                    self._sandbox.try_grammar(grammar, deadline)

        return trial

    def _around_answer(
        self, request: Request, wanted: Format, tools: Sequence[Tool], thinks: bool
    ) -> str:
        """A grammar for what comes before an answer that has a format, or in its place.

        Before it the model's reasoning and header; in the place of JSON calls that the model may
        make. A grammar of the caller's own is the whole answer.
        """
        if request.messages is None or request.partial_answer:
            return ""
        preamble, choice = self.markup.preamble, request.tool_choice
        if request.thinking is False:
            preamble = preamble._replace(think_start="", think_end="")
        if thinks:  # the prompt has begun it
            preamble = Preamble()
        may_call = choice.mode != "none" and wanted.grammar is None
        offered = tools if may_call else ()
        return answer_grammar(self.markup, preamble, offered, choice.parallel)


def _binding_less(tools: Sequence[Tool]) -> Iterator[Sequence[Tool]]:
    """The tools, and if their schemas are beyond a grammar the same with any arguments."""
    if tools:
        yield tools
        yield [_loose(tool) for tool in tools]


def _loose(tool: Tool) -> Tool:
    """The tool with any values for its arguments: some part of its schema is beyond a grammar."""
    function = tool["function"]
    schema = function.get("parameters") or {}
    names: dict[str, object] = {name: {} for name in properties_of(schema)}
    required = [name for name in required_of(schema) if name in names]
    named = {"properties": names, "required": required} if names else {}
    return {**tool, "function": {**function, "parameters": {"type": "object", **named}}}


def _with_ignored_keywords(request: Request, grammar: GrammarMatcher | None) -> Request:
    keywords = () if grammar is None else grammar.ignored[:MAX_KEYWORDS]
    if not keywords:
        return request
    named = tuple(f"schema.{each}" for each in keywords)
    return replace(request, ignored_fields=request.ignored_fields + named)


def _forbids_calls(request: Request) -> bool:
    """Whether calls are forbidden; the tools stay in the prompt, so that its prefix is shared."""
    return bool(request.tools) and request.tool_choice.mode == "none"


def _without_calls(sampling: Sampling, markup: Markup) -> Sampling:
    """Forbid the token that starts a call; where the start is text, a grammar does."""
    start = markup.tokenizer.get_added_vocab().get(markup.tool_format.start)
    return sampling if start is None else _forbid(sampling, [start])


def _forbid(sampling: Sampling, tokens: Iterable[int]) -> Sampling:
    return replace(sampling, logit_bias={**sampling.logit_bias, **dict.fromkeys(tokens, -100.0)})


class LatestAnswers:
    """The latest answer of each agent, recognised where a client sends it back as other text.

    A client that compacts a conversation asks for a summary, and begins anew with that summary in a
    message of its own. Thread-safe. Tenants' texts are compared with their own requests only.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[tuple[str, str], list[str]] = OrderedDict()

    def remember(self, request: Request, answer: str) -> None:
        """Keep the lines of an answer; of one without long lines nothing."""
        lines = [line for line in map(str.strip, answer.splitlines()) if len(line) >= MIN_LINE]
        if request.agent is None or not lines:
            return
        # NOTE: each of these steps is atomic, and none relies on the one before it: `clear` may
        # come between any two.
        self._lines.pop((request.tenant, request.agent), None)
        self._lines[request.tenant, request.agent] = lines[:MAX_LINES]
        if len(self._lines) > MAX_AGENTS:
            with suppress(KeyError):
                self._lines.popitem(last=False)

    def clear(self) -> None:
        self._lines.clear()

    def are_quoted(self, request: Request) -> bool:
        """Whether a message that is not the model's holds most of its agent's latest answer."""
        lines = self._lines.get((request.tenant, request.agent or ""), [])
        return bool(lines) and any(
            2 * sum(line in text for line in lines) > len(lines) for text in _given(request)
        )


def _given(request: Request) -> Iterator[str]:
    messages: list[Message] = list(request.messages or ())
    return (text_of(message) for message in messages if message.get("role") != "assistant")
