"""Prompts with a common prefix that arrive together: the prefix is computed once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.errors import Cancelled
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Request, Sampling, Started
from tests.kit.engines import Exam, ask, engine_on, held, tokens_of
from tests.kit.runs import prompt_of

SHARED = 600
KINDS = ("llama", "gemma3_text", "mamba2")
N = 3

each_kind = pytest.mark.parametrize("architecture", KINDS)


def agents(n: int) -> list[list[int]]:
    """Prompts that begin with the same 600 tokens and differ from the next one on."""
    return [[*prompt_of(SHARED), i, *prompt_of(10 + i, seed=i)] for i in range(n)]


def ask_together(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    with held(engine):
        return [engine.submit(request) for request in requests]


@each_kind
def test_six_at_once_share_one_prefill(models, tmp_path, architecture):
    """For every kind of cache: the common prefix is fed once, then each its own rest."""
    model, exam, n = models.of(architecture), Exam(models.module(architecture)), 6
    prompts = agents(n)
    with engine_on(model, tmp_path) as engine:
        results = [a.result() for a in ask_together(engine, [ask(p, N) for p in prompts])]
        own = sum(len(prompt) - SHARED for prompt in prompts)
        assert model.module.fed == SHARED + own + n * N
        assert engine.stats().counters["waited_for_prefix"] == n - 1
        assert [r.receipt.cached_tokens for r in results] == [0] + (n - 1) * [SHARED]
        for prompt, result in zip(prompts, results, strict=True):
            exam.add(prompt, result.choices[0])
    exam.check()


# Window rows inside a block lie with a sibling, and a tier looks at the few nearest of these; the
# end of the block before is always there.


@each_kind
def test_one_after_another_share_the_system_message(models, tmp_path, architecture):
    """At the end of a message all layers are kept, states too: each prefills only its question."""
    model, exam = models.of(architecture), Exam(models.module(architecture))
    system = {"role": "system", "content": "the answer is in the dog " * 40}
    fed = []
    with engine_on(model, tmp_path) as engine:
        for i in range(4):
            messages = [system, {"role": "user", "content": f"{i} is the question"}]
            request = Request(
                messages=messages, sampling=Sampling(max_tokens=N, temperature=0, top_logprobs=20)
            )
            prepared, before = engine.prepare(request), model.module.fed
            exam.add(prepared.tokens, engine.submit(request).result().choices[0])
            engine.wait_until_saved()
            fed.append(model.module.fed - before - N)
        n_shared = prepared.prompt.cuts[0]
    assert n_shared > 256  # more than a block, and not at the end of one
    assert fed[0] == len(prepared.tokens)
    assert max(fed[1:]) <= len(prepared.tokens) - n_shared
    exam.check()


def test_a_waiter_that_is_asked_later_still_waits(models, tmp_path):
    model = models.of("llama")
    prompts = agents(2)
    with engine_on(model, tmp_path) as engine:
        leader = engine.submit(ask(prompts[0], N))
        assert isinstance(next(leader), Started)
        waiter = engine.submit(ask(prompts[1], N))
        assert waiter.result().receipt.cached_tokens == SHARED
        leader.result()
    assert model.module.fed == SHARED + sum(len(p) - SHARED for p in prompts) + 2 * N


@pytest.mark.parametrize("architecture", ["llama", "mamba2"])
def test_the_first_waiter_leads_when_the_leader_is_cancelled(models, tmp_path, architecture):
    """What the leader has prefilled is not computed again."""
    model, exam = models.of(architecture), Exam(models.module(architecture))
    prompts = agents(4)
    with engine_on(model, tmp_path) as engine:
        with held(engine):
            leader, *others = [engine.submit(ask(prompt, N)) for prompt in prompts]
            leader.cancel()  # obeyed before the first step
        results = [answer.result() for answer in others]
        with pytest.raises(Cancelled):
            leader.result()
        own = sum(len(prompt) - SHARED for prompt in prompts[1:])
        assert model.module.fed == SHARED + own + 3 * N
        for prompt, result in zip(prompts[1:], results, strict=True):
            exam.add(prompt, result.choices[0])
    exam.check()


def test_a_leader_cancelled_half_way(models, tmp_path):
    """The waiters continue from what it has prefilled."""
    model = models.of("llama")
    prompts = agents(3)
    with engine_on(model, tmp_path) as engine:
        engine._scheduler.slice_sizer.max_slice = 5  # so many that this thread may be late
        leader, *others = ask_together(engine, [ask(prompt, N) for prompt in prompts])
        events = [next(leader) for _ in range(5)]  # started, and four slices: fewer are not loaded
        leader.cancel()
        for answer in others:
            answer.result()
        n_read = engine.stats().counters["prefilled_tokens"]
        assert n_read == SHARED + sum(len(prompt) - SHARED for prompt in prompts[1:])
        assert events[4].done == 20


def test_tenants_that_ask_together_share_no_prefill(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        requests = [ask(agents(1)[0], N, tenant=tenant) for tenant in ("ada", "bob")]
        results = [answer.result() for answer in ask_together(engine, requests)]
        assert [result.receipt.cached_tokens for result in results] == [0, 0]
        assert engine.stats().counters["waited_for_prefix"] == 0


def test_no_store_neither_waits_nor_leads(models, tmp_path):
    model = models.of("llama")
    prompts = agents(3)
    with engine_on(model, tmp_path) as engine:
        policies = [Policy.NO_STORE, Policy.READ_WRITE, Policy.NO_STORE]
        requests = [ask(p, N, policy=how) for p, how in zip(prompts, policies, strict=True)]
        results = [answer.result() for answer in ask_together(engine, requests)]
        assert engine.stats().counters["waited_for_prefix"] == 0
        assert [result.receipt.cached_tokens for result in results] == [0, 0, 0]
        assert engine.stats().counters["prefilled_tokens"] == sum(map(len, prompts))
        again = engine.submit(ask(prompts[0], N, policy=Policy.NO_STORE)).result()
        assert again.receipt.cached_tokens == 0
        assert tokens_of(again.choices[0]) == tokens_of(results[0].choices[0])


def test_read_only_waits_but_does_not_lead(models, tmp_path):
    model = models.of("llama")
    prompts = agents(4)
    with engine_on(model, tmp_path) as engine:
        policies = [Policy.READ_ONLY, Policy.READ_WRITE, Policy.READ_ONLY, Policy.EPHEMERAL]
        requests = [ask(p, N, policy=how) for p, how in zip(prompts, policies, strict=True)]
        results = [answer.result() for answer in ask_together(engine, requests)]
        assert [r.receipt.cached_tokens for r in results] == [0, 0, SHARED, SHARED]
        assert engine.stats().counters["waited_for_prefix"] == 2
        # Of read-only ones nothing is found later; of ephemeral ones all, but not after a restart.
        assert cached(engine, prompts[2]) == SHARED
        assert cached(engine, prompts[3]) == len(prompts[3]) - 1
    with engine_on(model, tmp_path) as engine:
        assert cached(engine, prompts[3]) == SHARED
        assert cached(engine, prompts[1]) == len(prompts[1]) - 1


def cached(engine: Engine, prompt: list[int]) -> int:
    request = ask(prompt, 1, policy=Policy.READ_ONLY)
    return engine.submit(request).result().receipt.cached_tokens


def test_a_waiter_holds_no_memory(models, tmp_path):
    """Only requests that prefill or decode count against the budget."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine._scheduler.slice_sizer.max_slice = 100
        answers = ask_together(engine, [ask(prompt, N) for prompt in agents(6)])
        [next(answers[0]) for _ in range(3)]
        leases = engine.call(lambda: [job.lease for job in engine._scheduler.waiting]).result()
        for answer in answers:
            answer.result()
        assert all(lease is None for lease in leases)
        assert engine.call(lambda: engine._scheduler._intake._admission.used_bytes).result() == 0


def test_an_urgent_request_raises_the_priority_of_what_it_waits_for(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine._scheduler.slice_sizer.max_slice = 50
        prompts = [prompt_of(500, seed=80), *agents(1)]
        urgent = [*prompts[1][:SHARED], 9, 9]
        with held(engine):
            slow = engine.submit(ask(prompts[0], N))
            leader = engine.submit(ask(prompts[1], N))
        assert isinstance(next(leader), Started)
        first = engine.submit(ask(urgent, N, priority=5))
        order = finishing_order({"slow": slow, "leader": leader, "urgent": first})
    # The one that waits is asked for last, shares with the leader, and both overtake the first.
    assert order.index("urgent") < order.index("slow")


def finishing_order(answers: dict[str, Answer]) -> list[str]:
    ends = {}
    for name, answer in answers.items():
        ends[name] = answer.result().usage.ttft_ms
    return sorted(ends, key=lambda name: ends[name])


def test_priorities_decide_the_order(models, tmp_path):
    """Of several waiting requests the most urgent starts first and is prefilled first."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        with held(engine):
            plain = [engine.submit(ask(prompt_of(400, seed=90 + i), 2)) for i in range(6)]
            urgent = engine.submit(ask(prompt_of(400, seed=99), 2, priority=1))
        ttft = urgent.result().usage.ttft_ms
        assert ttft < min(answer.result().usage.ttft_ms for answer in plain)
