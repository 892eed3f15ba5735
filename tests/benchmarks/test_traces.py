"""Real agent traffic, scaled down: 20 conversations, every length divided by 16."""

from collections import Counter
from functools import cache
from itertools import islice

import mlx.core as mx
import pytest
from benchmarks.requests.recorded import load, requests
from benchmarks.rivals import Fifo, reusable
from benchmarks.traces import (
    BUDGETS,
    FIFO_10,
    OURS,
    OURS_Q4,
    OURS_Q8,
    SESSIONS,
    TAIL_FIRST,
    Task,
    replay,
)
from mlx_lm.models.cache import KVCache, LRUPromptCache

SMALL = [budget // 16 for budget in BUDGETS]


@cache
def result(policy, budget):
    return replay(Task(policy, budget, n_conversations=20, divisor=16))


def test_the_trace_is_whole():
    conversations = load()
    turns = [turn for conversation in conversations for turn in conversation.turns]
    assert len(conversations) == 360
    assert len(turns) == 23_669
    assert sum(n_input for _, _, n_input, _ in turns) == 3_060_147_537
    assert all(common <= n_input for _, common, n_input, _ in turns)


def test_the_clock_orders_requests_and_eight_run_at_a_time():
    conversations = load(40, 16)
    made = list(requests(conversations))
    assert len(made) == sum(len(c.turns) for c in conversations)
    assert [r.now for r in made] == sorted(r.now for r in made)
    left = Counter({n: len(c.turns) for n, c in enumerate(conversations)})
    begun = set()
    for request in made:
        begun.add(request.conversation)
        assert sum(left[n] > 0 for n in begun) <= 8
        left[request.conversation] -= 1


@pytest.mark.parametrize(
    "budget",
    [pytest.param(n, marks=pytest.mark.soak if i else ()) for i, n in enumerate(SMALL)],
)
def test_no_more_is_prefilled_than_by_plain_lru(budget):
    """What the eviction is for: at no budget is it worse than least recently used, tail first."""
    ours, plain = result(OURS, budget), result(TAIL_FIRST, budget)
    assert ours.input_tokens == plain.input_tokens
    assert ours.prefilled_tokens <= plain.prefilled_tokens


@pytest.mark.parametrize("budget", SMALL[:1])
def test_much_less_is_prefilled_than_by_whole_sessions_or_a_list(budget):
    ours = result(OURS, budget).prefilled_tokens
    assert ours < 0.9 * result(SESSIONS, budget).prefilled_tokens
    assert ours < 0.8 * result(FIFO_10, budget).prefilled_tokens


def test_less_is_prefilled_where_blocks_are_smaller():
    tasks = (Task(name, BUDGETS[0] // 32, 4, 32) for name in (OURS, OURS_Q8, OURS_Q4))
    exact, q8, q4 = (replay(task).prefilled_tokens for task in tasks)
    assert q4 < q8 < 0.8 * exact


def test_without_pressure_everything_in_common_is_found():
    n_tokens = 10_000_000
    ideal = sum(r.n_input - reusable(r, r.n_common) for r in requests(load(20, 16)))
    for policy in (OURS, TAIL_FIRST, SESSIONS):
        assert result(policy, n_tokens).prefilled_tokens == ideal


def test_the_list_against_that_of_mlx_lm():
    """mlx-lm's own class, on the same requests, leaves the same tokens to prefill."""
    limit = 2_000
    ours, theirs = Fifo(limit, max_entries=10), LRUPromptCache(10, limit * 8)
    tokens = {}
    for n, request in enumerate(islice(requests(load(12, 256)), 250)):
        size = request.n_input + request.n_output
        kept = tokens.get(request.conversation, [])[: request.n_common]
        new = [1_000_000 * (n + 1) + i for i in range(size - len(kept))]
        tokens[request.conversation] = kept + new
        prompt = tokens[request.conversation][: request.n_input]
        _, rest = theirs.fetch_nearest_cache("model", prompt)
        assert ours.serve(request) == request.n_input - max(1, len(rest))
        made = KVCache()
        made.keys = made.values = mx.zeros((1, 1, size, 1))
        made.offset = size
        theirs.insert_cache("model", tokens[request.conversation], [made])
