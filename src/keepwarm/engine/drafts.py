"""Drafts: tokens that may come next, because they came after the same tokens before.

A conversation repeats itself: files are read and written back, calls have the shape of earlier
calls. What followed the latest tokens earlier is fed along with the current token, in one step; the
tokens that the sampler then picks as well are kept, the others are taken back. So a draft never
changes an answer, only how many tokens a step gives.

    Source       proposes what may come next in a conversation
    SeenTexts    what followed the same tokens earlier in it, in a tenant's other conversations, or
                 in tool results as a call would repeat them
    RowDrafts    the drafts of one sequence, and how often they were right
    DraftGate    how long drafts may be, by what steps cost here and how often drafts are right
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from statistics import median_low
from typing import NamedTuple, Protocol, TypeAlias

from keepwarm.prefix.blocks import as_text
from keepwarm.prefix.recent import RecentPrompts

DRAFT_COUNTS = ("steps", "drafted", "accepted")
MIN_MATCH, MAX_MATCH = 3, 14  # tokens
MAX_DRAFT = 15
MAX_PROPOSED = 64
MAX_OTHER_TOKENS = 32768  # of other texts that are searched
WIDTHS = (2, 3, 4, 5, 8, 16)  # tokens a row of one step: the current one and a draft
FORCED = MAX_MATCH + 1  # "matched" by tokens that a grammar forces
MATCHES = (3, 4, 5, 8, 14, FORCED)  # lengths of matches that are told apart
CONTEXT_TOKENS = 4096  # contexts of so many tokens, and of twice, four times … are told apart
N_TIMES, MIN_TIMES = 5, 2  # the latest, of which the lower median counts
FORGET_STEPS = 2048  # a cost that was not seen for so long is tried again
# What drafts may lose, in plain steps: so many, and a share of all steps. What they gain may be
# lost again, but never more at a time. And what looking for them may take, beside what they gain.
MAX_CREDIT, CREDIT_SHARE = 8.0, 0.01
MAX_SEARCHING, SEARCHING_SHARE = 2.0, 0.005
MIN_GAIN = 1.03
MAX_WAIT = 1.5  # what a row without a draft waits for others, in plain steps
FIRST_GUESS = 0.6  # of a drafted token that it is right, before any was seen
GUESS_WEIGHT = 4
FORGETTING = 0.97


class Proposal(NamedTuple):
    """What may come next, and how many tokens before it are the same."""

    n_matched: int
    tokens: Sequence[int]

    def after(self, token: int) -> Proposal | None:
        """What is left of it once its first token came; None if another came, or too little is."""
        if token != self.tokens[0] or len(self.tokens) <= MAX_DRAFT:
            return None
        n_matched = max(self.n_matched, min(self.n_matched + 1, MAX_MATCH))
        return Proposal(n_matched, self.tokens[1:])


Others: TypeAlias = Callable[[], Iterable[str]]
Fitted: TypeAlias = Callable[[Sequence[int]], Sequence[int]]


class Source(Protocol):
    def append(self, token: int) -> None:
        """A token of the conversation."""

    def propose(self) -> Proposal | None: ...


class SeenTexts:
    """The tokens of a conversation and of other texts, searched from their ends. A token is a
    character: so they are searched fast, and need no index.
    """

    def __init__(self, tokens: Sequence[int], others: Others = tuple) -> None:
        self._own = as_text(tokens)
        self._others = others

    def append(self, token: int) -> None:
        self._own += chr(token)

    def propose(self) -> Proposal | None:
        """What followed the longest match with the latest tokens: the latest one of several, and in
        the conversation itself before other texts.
        """
        best, n_matched = "", MIN_MATCH - 1
        for text, start in self._searched():
            following, n_matched = _longest(text, self._own, start, n_matched)
            best = text[following : following + MAX_PROPOSED] if following else best
        return Proposal(n_matched, list(map(ord, best))) if best else None

    def _searched(self) -> Iterator[tuple[str, int]]:
        """The texts, and from where on each is searched."""
        yield self._own, 0
        n_left = MAX_OTHER_TOKENS
        for text in self._others():
            if self._own.startswith(text):
                continue  # an earlier turn
            n_searched = min(n_left, len(text))
            yield text, len(text) - n_searched
            n_left -= n_searched
            if not n_left:
                return


def _longest(text: str, own: str, start: int, n: int) -> tuple[int, int]:
    """Where, from `start` on, the longest match of more than `n` tokens with the end of `own` ends,
    and its length; 0 and `n` if there is none.
    """
    following, end = 0, len(text) - 1  # something must follow
    most = min(MAX_MATCH, len(own))
    while n < most:
        found = text.rfind(own[-n - 1 :], start, end)
        if found < 0:
            break
        following, n = found + n + 1, n + 1
        while n < min(most, following) and text[following - n - 1] == own[-n - 1]:
            n += 1
        end = following - 1
    return following, n


class HitRates:
    """How often drafted tokens are right, by the length of the match and the place in the draft."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[float, float]] = {}  # right, and all

    def count(self, n_matched: int, place: int, is_right: bool) -> None:
        key = _match_class(n_matched), place
        right, seen = self._seen.get(key, (0.0, 0.0))
        self._seen[key] = right * FORGETTING + is_right, seen * FORGETTING + 1

    def expected(self, proposal: Proposal, n: int) -> float:
        """How many of the first `n` tokens of a draft will be right."""
        places = range(min(n, len(proposal.tokens)))
        rates = [self._rate(proposal.n_matched, place) for place in places]
        return float(sum(accumulate(rates, mul)))

    def _rate(self, n_matched: int, place: int) -> float:
        right, seen = self._seen.get((_match_class(n_matched), place), (0.0, 0.0))
        return (right + GUESS_WEIGHT * FIRST_GUESS) / (seen + GUESS_WEIGHT)


def _match_class(n_matched: int) -> int:
    return max(length for length in MATCHES if length <= n_matched)


class BatchSize(NamedTuple):
    """What a step of a batch costs depends on it."""

    n_rows: int
    context: int  # tokens of the longest row

    def key(self, width: int) -> tuple[int, int, int]:
        return self.n_rows, width, (self.context // CONTEXT_TOKENS).bit_length()


class StepCosts:
    """Seconds of a step, by rows, tokens a row and context."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int, int], deque[float]] = {}
        self._last: dict[tuple[int, int, int], int] = {}
        self._n_steps = 0
        self._ahead: tuple[int, float] | None = None  # rows and end of the step before, if it was

    def saw(self, size: BatchSize, width: int, seconds: float) -> None:
        """A step from when its tokens were known until it was computed."""
        self._ahead = None
        self._count(size.key(width), seconds)

    def saw_end_ahead(self, size: BatchSize, now: float, is_undisturbed: bool) -> None:
        """A plain step that the device still computes. What it costs shows in the time between the
        ends of two, if it ran ahead and nothing else ran between them.
        """
        before, self._ahead = self._ahead, (size.n_rows, now)
        if before is not None and before[0] == size.n_rows and is_undisturbed:
            self._count(size.key(1), now - before[1])

    def latest(self, size: BatchSize, width: int) -> Sequence[float]:
        return tuple(self._times.get(size.key(width), ()))

    def missed_step(self) -> None:
        """A step that is not measured: the next end says nothing of a single step."""
        self._ahead = None

    def _count(self, key: tuple[int, int, int], seconds: float) -> None:
        self._n_steps += 1
        self._times.setdefault(key, deque(maxlen=N_TIMES)).append(seconds)
        self._last[key] = self._n_steps

    def get(self, size: BatchSize, width: int) -> float | None:
        """None if it is not known well, or has not been seen for long."""
        key = size.key(width)
        if width > 1 and self._n_steps - self._last.get(key, 0) > FORGET_STEPS:
            self._times.pop(key, None)
        times = self._times.get(key)
        return median_low(times) if times and len(times) >= MIN_TIMES else None


class DraftGate:
    """Decides for each step how many drafted tokens are fed; one for each model."""

    def __init__(self, recent: RecentPrompts) -> None:
        self.rates = HitRates()
        self.costs = StepCosts()
        self.source: Callable[[Sequence[int], Others], Source] = SeenTexts
        self._recent = recent
        self.is_open = True  # False once a step with drafts has failed
        self._credit, self._searching = MAX_CREDIT, MAX_SEARCHING

    def drafts_for(
        self, tokens: Sequence[int], rewritten: Sequence[Sequence[int]], owner: Hashable | None
    ) -> RowDrafts:
        """Of a conversation. `owner` is whose other texts are searched, None: nobody's."""
        results = [as_text(result) for result in rewritten]

        def others() -> Iterable[str]:
            yield from results
            if owner is not None:
                yield from self._recent.latest(owner)

        return RowDrafts(self.source(tokens, others), self.rates)

    def may_search(self, size: BatchSize) -> bool:
        """Whether drafts are looked for: not before it is known what a plain step costs."""
        return self.is_open and self._searching > 0 and self.costs.get(size, 1) is not None

    def width(self, proposals: Sequence[Proposal | None], size: BatchSize) -> int:
        """Tokens a row of the step that gives most tokens a second; 1: no drafts."""
        n_rows, plain = size.n_rows, self.costs.get(size, 1)
        drafts = [proposal for proposal in proposals if proposal is not None]
        if plain is None or not drafts or not self.is_open:
            return 1
        best, least_gain = 1, MIN_GAIN
        most = MAX_WAIT * plain if len(drafts) < n_rows else float("inf")
        longest = 1 + max(len(draft.tokens) for draft in drafts)
        for width in (width for width in WIDTHS if width <= max(2, longest)):
            known = self.costs.get(size, width)
            cost = known or plain  # what was never tried may cost no more
            n_tokens = n_rows + sum(self.rates.expected(draft, width - 1) for draft in drafts)
            gain = n_tokens / n_rows * plain / cost
            if gain > least_gain and cost <= most and self._can_lose(size, width, plain):
                best, least_gain = width, gain
                if known is None:
                    break  # it is tried
        return best

    def _most(self, size: BatchSize, width: int) -> float:
        """What a step costs at most: a token as much as in a narrower one."""
        known = ((n, self.costs.get(size, n)) for n in (1, *WIDTHS) if n <= width)
        return min(cost * width / n for n, cost in known if cost is not None)

    def _can_lose(self, size: BatchSize, width: int, plain: float) -> bool:
        """Whether there is credit for a step of which nothing is right; for all those that it takes
        to know what it costs.
        """
        n_steps = max(1, MIN_TIMES - len(self.costs.latest(size, width)))
        return n_steps * (self._most(size, width) / plain - 1) <= self._credit

    def searched(self, size: BatchSize, seconds: float, spare_s: float = 0.0) -> None:
        """How long it took to look for drafts, and of it how long the host would have waited for
        the device.
        """
        if plain := self.costs.get(size, 1):
            self._searching -= max(0.0, seconds - spare_s) / plain

    def saw_step(
        self, size: BatchSize, width: int, n_accepted: int, seconds: float, n_again: int = 0
    ) -> None:
        """What a step cost that is computed, how many drafted tokens it gave, and how many tokens
        were computed again for it.
        """
        gain, plain = 0.0, self.costs.get(size, 1)
        if width > 1 and plain is not None:
            charged = self._charged(size, width, seconds, n_again)
            gain = 1 + n_accepted / size.n_rows - charged / plain
        self.costs.saw(size, width, seconds)
        self._earn(gain)

    def _charged(self, size: BatchSize, width: int, seconds: float, n_again: int) -> float:
        """The first step of a shape, for which CUDA makes a plan, may take as long as twenty, and
        would keep drafts off for long. So a step counts at most twice what its width costs; while
        that is not known, what it may cost at most, and the first as much as the second.
        """
        known, before = self.costs.get(size, width), self.costs.latest(size, width)
        if known is not None:
            return min(2 * known, seconds)
        most = self._most(size, width) * (width + n_again) / width
        charged = min(most, seconds)
        return charged - sum(max(0.0, min(most, first) - charged) for first in before)

    def saw_end_ahead(self, size: BatchSize, now: float, is_undisturbed: bool) -> None:
        """The same of a plain one that the device still computes."""
        self.costs.saw_end_ahead(size, now, is_undisturbed)
        self._earn(0.0)

    def _earn(self, gain: float) -> None:
        self._credit = min(MAX_CREDIT, self._credit + CREDIT_SHARE + gain)
        found = SEARCHING_SHARE + max(0.0, gain)  # what drafts give pays for looking
        self._searching = min(MAX_SEARCHING, self._searching + found)


class RowDrafts:
    """What is proposed for one sequence. A proposal is compared with what comes, fed or not: by
    those that were fed alone the gate would never learn that longer ones pay.
    """

    def __init__(self, source: Source, rates: HitRates) -> None:
        self._source = source
        self._rates = rates
        self._proposal: Proposal | None = None  # what is left of the latest
        self._watched: Proposal | None = None
        self._n_right = 0  # tokens of it that came
        self.counts: Counter[str] = Counter()  # by DRAFT_COUNTS

    def propose(self, fitted: Fitted = list) -> Proposal | None:
        """`fitted` returns what of a draft may come, or what must come instead."""
        found = self._proposal or self._source.propose() or Proposal(FORCED, ())
        first = found.tokens[:MAX_DRAFT]  # a grammar takes long to check more
        tokens = fitted(first)
        if tokens != first:
            is_cut = tokens == first[: len(tokens)]
            found = Proposal(found.n_matched if is_cut else FORCED, tokens)
        self._proposal = found if found.tokens else None
        if self._watched is None:
            self._watched, self._n_right = self._proposal, 0
        return self._proposal

    def saw(self, token: int) -> None:
        """A token of the answer."""
        self._source.append(token)
        self._proposal = None if self._proposal is None else self._proposal.after(token)
        watched, place = self._watched, self._n_right
        if watched is None:
            return
        is_right = token == watched.tokens[place]
        self._rates.count(watched.n_matched, place, is_right)
        self._n_right += 1
        if not is_right or self._n_right == min(MAX_DRAFT, len(watched.tokens)):
            self._watched = None
