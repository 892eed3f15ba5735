"""Drafts change how many tokens a step gives, and nothing else."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.zoo.findings import Results

from keepwarm.cache.restore.restorer import Capture
from keepwarm.concurrency import DeviceLock
from keepwarm.engine import batch as batches
from keepwarm.engine import scheduler
from keepwarm.engine.answer import Answer
from keepwarm.engine.batch import Batch
from keepwarm.engine.drafts import (
    FORCED,
    MAX_DRAFT,
    MAX_MATCH,
    MAX_OTHER_TOKENS,
    MAX_PROPOSED,
    MIN_MATCH,
    BatchSize,
    DraftGate,
    HitRates,
    Proposal,
    RowDrafts,
    SeenTexts,
    StepCosts,
)
from keepwarm.engine.jobs import Job, _drafts_of
from keepwarm.errors import Cancelled
from keepwarm.kv import Kind
from keepwarm.prefix.blocks import BLOCK_TOKENS, as_text
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.text.request import Format, KVOptions, ToolChoice
from tests.kit.engines import ask, engine_on, held, tokens_of
from tests.kit.models import CACHE_KINDS, VOCABULARY, WINDOW
from tests.kit.runs import prompt_of
from tests.kit.waiting import wait_until

N = 40
PROMPTS = [prompt_of(n, seed=n) for n in (3 * WINDOW, 17, 60, 9)]
KINDS = {
    "llama": {},
    "gemma3_text": {},  # crosses its windows
    "quantised": {"kv": KVOptions(kv_bits=8, kv_group_size=32)},
}
SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 7},
    "penalised": {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
}
# Where a sum's last bit differs, a key between two levels of 8 bits is rounded to the other one.
APART = {"quantised": 1e-3}
ANIMALS = {
    "format": Format(
        schema={
            "type": "object",
            "properties": {
                "first_animal": {"enum": ["cat", "dog"]},
                "second_animal": {"enum": ["horse", "cow"]},
                "legs": {"enum": [2, 4]},
            },
            "required": ["first_animal", "second_animal", "legs"],
        }
    )
}
TOOL = {"type": "function", "function": {"name": "choose", "parameters": ANIMALS["format"].schema}}
CALL = {"tools": [TOOL], "tool_choice": ToolChoice("required")}
ONE_ROW = BatchSize(1, 0)
DRAFT = Proposal(MIN_MATCH, list(range(MAX_DRAFT)))
ZOO = Path(__file__).parents[2] / "docs/results/zoo.json"


class Oracle:
    """Proposes the answers that are known, with a wrong token here and there."""

    def __init__(self, monkeypatch, answers, wrong=0.3, seed=0):
        """`answers` by prompt."""
        self.know(answers)
        self._random = random.Random(seed)
        self._wrong = wrong
        oracle = self

        class Known:
            def __init__(self, tokens, others):
                self.answer, self.n_seen = oracle._answers.get(tuple(tokens), []), 0

            def propose(self):
                return oracle._propose(self.answer[self.n_seen :])

            def append(self, token):
                self.n_seen += 1

        gate = DraftGate.__init__

        def start(own, recent):
            gate(own, recent)
            own.source = Known

        def width(gate, proposals, size):
            return oracle._width(proposals, size) if gate.is_open else 1

        monkeypatch.setattr(DraftGate, "__init__", start)
        decide(monkeypatch, width)

    def know(self, answers):
        self._answers = {tuple(prompt): answer for prompt, answer in answers}

    def _propose(self, following):
        tokens = [
            (t + 1) % 100 if self._random.random() < self._wrong else t
            for t in following[:MAX_DRAFT]
        ]
        return Proposal(MIN_MATCH, tokens) if tokens else None

    def _width(self, proposals, size):
        assert len(proposals) == size.n_rows
        return self._random.choice([1, 2, 3, 5, 8, 16]) if any(proposals) else 1


def decide(monkeypatch, width):
    """In place of what steps cost here."""
    monkeypatch.setattr(DraftGate, "may_search", lambda gate, _: gate.is_open)
    monkeypatch.setattr(DraftGate, "width", width)


@pytest.fixture(params=[False, True], ids=["waits", "runs-ahead"])
def runs_ahead(request, monkeypatch):
    """Steps as on a GPU, which are fed before their tokens are known."""
    monkeypatch.setattr(batches, "works_beside_host", lambda: request.param)
    return request.param


def drafting(model, home):
    return engine_on(model, home, environment={"KEEPWARM_SPECULATION": "auto"})


def run(engine, requests):
    """All at the same time."""
    for request in requests:
        engine.prepare(request)  # a lane is made by the engine's thread
    with held(engine):
        answers = [engine.submit(request) for request in requests]
    return [answer.result() for answer in answers]


def told(results):
    return [[c.text, c.reason, c.stop, tokens_of(c)] for r in results for c in r.choices]


def requests_of(prompts, **wishes):
    return [ask(prompt, N, **wishes) for prompt in prompts]


# Without --soak every third, in which all pairs of two choices are.
COMBINATIONS = [
    pytest.param(kind, sampling, n_rows, ahead, marks=[pytest.mark.soak] * ((i + j + k) % 3 > 0))
    for i, kind in enumerate(KINDS)
    for j, sampling in enumerate(SAMPLINGS)
    for k, (n_rows, ahead) in enumerate([(1, False), (4, False), (4, True), (1, True)])
]


@pytest.mark.parametrize(
    ("kind", "sampling", "n_rows", "runs_ahead"), COMBINATIONS, indirect=["runs_ahead"]
)
def test_an_answer_is_the_same_with_drafts(
    kind, sampling, n_rows, runs_ahead, models, tmp_path, monkeypatch
):
    model = models.of("llama" if kind == "quantised" else kind)
    requests = requests_of(PROMPTS[:n_rows], **KINDS[kind], **SAMPLINGS[sampling])
    with engine_on(model, tmp_path / "off") as engine:
        plain = run(engine, requests)
    assert plain[0].receipt.speculation is None
    Oracle(monkeypatch, zip(PROMPTS, [c[3] for c in told(plain)], strict=False))
    with drafting(model, tmp_path / "on") as engine:
        drafted = run(engine, requests)
        later = run(engine, [ask([*PROMPTS[0], *told(drafted)[0][3], 1], 2, **KINDS[kind])])[0]
    assert told(drafted) == told(plain)
    for cold, fast in zip(plain, drafted, strict=True):
        counts = fast.receipt.speculation
        assert counts["accepted"] > 3
        assert counts["drafted"] > counts["accepted"]
        assert counts["steps"] + counts["accepted"] == N
        for a, b in zip(cold.choices[0].tokens, fast.choices[0].tokens, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=APART.get(kind, 1e-4))
    assert later.receipt.recomputed <= 2  # the last token is fed again, and the new one


@pytest.mark.soak
@pytest.mark.parametrize("n_rows", [1, 4])
@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_answers_are_the_same_with_drafts(
    kind, sampling, n_rows, models, tmp_path, monkeypatch
):
    model = models.of("llama" if kind == "quantised" else kind)
    prompts = [prompt_of(5 + seed % (3 * WINDOW), seed=seed) for seed in range(200)]
    requests = [ask(prompt, 16, **KINDS[kind], **SAMPLINGS[sampling]) for prompt in prompts]
    together = [requests[i : i + n_rows] for i in range(0, len(requests), n_rows)]
    with engine_on(model, tmp_path / "off") as engine:
        plain = [told(run(engine, some)) for some in together]
    answers = [answer[3] for some in plain for answer in some]
    Oracle(monkeypatch, zip(prompts, answers, strict=True))
    with drafting(model, tmp_path / "on") as engine:
        drafted = [run(engine, some) for some in together]
    assert [told(some) for some in drafted] == plain
    assert sum(r.receipt.speculation["accepted"] for some in drafted for r in some) > 200


def assert_same_with_drafts(model, home, monkeypatch):
    """Alone, and together; whether there were drafts. Types with states and windows, those whose
    caches have no batched form, and those whose steps with drafts fail get none.
    """
    requests = [ask(prompt, 8) for prompt in PROMPTS[:2]]
    oracle = Oracle(monkeypatch, [])

    def answered(engine, asked):
        return [*run(engine, asked[:1]), *run(engine, asked)]

    with drafting(model, home) as engine:
        plain = answered(engine, [replace(request, speculation=False) for request in requests])
        oracle.know(zip(PROMPTS, [c[3] for c in told(plain[1:])], strict=False))
        drafted = answered(engine, requests)
        lane = engine.lane_of()
        kinds, gate = lane.restorer.layout.kinds, lane.gate
    if told(plain)[0] != told(plain)[1]:
        return False  # of this type rows differ in a batch, which the engine tries out before
    can_draft = lane.sharing.can_batch and not {Kind.WINDOW, Kind.STATE} <= kinds
    assert (gate is not None) == can_draft
    assert told(drafted) == told(plain)
    assert all((one.receipt.speculation is not None) == can_draft for one in drafted)
    if gate is None or not gate.is_open:
        return False
    assert drafted[0].receipt.speculation["accepted"]
    return True


@pytest.mark.parametrize("architecture", CACHE_KINDS)
def test_every_kind_of_cache_answers_the_same_with_drafts(
    architecture, models, tmp_path, monkeypatch
):
    has_drafts = assert_same_with_drafts(models.of(architecture), tmp_path, monkeypatch)
    assert has_drafts == (architecture in {"llama", "gemma3_text", "mamba2", "falcon_h1"})


@pytest.mark.soak
def test_every_type_of_the_zoo_answers_the_same_with_drafts(models, tmp_path):
    n_drafting = 0
    for one in Results.read(ZOO).of("float32"):
        if one.left_out:
            continue
        with pytest.MonkeyPatch.context() as patch:
            model = models.of(one.name)
            n_drafting += assert_same_with_drafts(model, tmp_path / one.name, patch)
    assert n_drafting > 80


def test_an_answer_that_ends_in_a_draft_ends_there(runs_ahead, models, tmp_path, monkeypatch):
    """By its length, a stop token or a stop string: nothing behind it is said or kept."""
    prompt = PROMPTS[0]
    with engine_on(models.of("llama"), tmp_path / "off") as engine:
        known = tokens_of(run(engine, [ask(prompt, N)])[0].choices[0])
    Oracle(monkeypatch, [(prompt, known)], wrong=0.0)
    monkeypatch.setattr(DraftGate, "width", lambda *_: 16)
    model = models.of("llama")
    stop = known[9]
    model.tokenizer.eos_token_ids = {stop}
    n_said = known.index(stop) + 1
    spoken = model.tokenizer.decode(known[3:5])
    with drafting(model, tmp_path / "on") as engine:
        (short,) = run(engine, [ask(prompt, 7)])
        (cut,) = run(engine, [ask(prompt, N, stop=(spoken,))])
        (stopped,) = run(engine, [ask(prompt, N)])
        engine.wait_until_saved()
        n_rows = engine.lane_of().n_warm([*prompt, *known[:n_said], 1])
    assert tokens_of(short.choices[0]) == known[:7]
    assert short.choices[0].reason == "length"
    assert cut.choices[0].stop == spoken
    assert spoken not in cut.choices[0].text
    assert tokens_of(cut.choices[0]) == known[:5]
    assert tokens_of(stopped.choices[0]) == known[:n_said]
    assert stopped.choices[0].reason == "stop"
    assert stopped.receipt.speculation["accepted"] > 0
    assert n_rows == len(prompt) + n_said


def called(results):
    return [[(call.name, call.arguments) for call in r.choices[0].tool_calls] for r in results]


def no_blanks(model):
    """So that a random model ends what a grammar lets it write."""
    return {i: -100.0 for i in range(VOCABULARY) if not model.tokenizer.decode([i]).strip()}


@pytest.mark.parametrize("wanted", [ANIMALS, CALL], ids=["schema", "tool"])
def test_an_answer_that_follows_a_grammar_is_the_same_with_drafts(
    wanted, runs_ahead, models, tmp_path, monkeypatch
):
    """Greedy and seeded, at the same time. A draft is cut where the grammar forbids it."""
    model, wishes = models.of("llama"), ({}, {"temperature": 0.8, "seed": 7})
    requests = [
        ask(p, 3 * N, logit_bias=no_blanks(model), **wanted, **w)
        for p, w in zip(PROMPTS, wishes, strict=False)
    ]
    with engine_on(model, tmp_path / "off") as engine:
        plain = run(engine, requests)
    assert all(one.choices[0].reason in ("stop", "tool_calls") for one in plain)
    Oracle(monkeypatch, zip(PROMPTS, [c[3] for c in told(plain)], strict=False))
    with drafting(model, tmp_path / "on") as engine:
        drafted = run(engine, requests)
    assert told(drafted) == told(plain)
    assert called(drafted) == called(plain)
    assert all(called(plain)) == ("tools" in wanted)
    assert all(one.receipt.speculation["accepted"] > 3 for one in drafted)


def test_tokens_that_a_grammar_forces_are_drafted(models, tmp_path, monkeypatch):
    """Nothing like the answer was seen before."""
    decide(monkeypatch, lambda _, proposals, __: 8 if any(proposals) else 1)
    model = models.of("llama")
    request = ask(PROMPTS[0], 3 * N, logit_bias=no_blanks(model), **ANIMALS)
    with drafting(model, tmp_path) as engine:
        (drafted,) = run(engine, [request])
        (plain,) = run(engine, [replace(request, speculation=False)])
    assert told([drafted]) == told([plain])
    counts = drafted.receipt.speculation
    assert counts["accepted"] > 10
    assert counts["accepted"] > 0.7 * counts["drafted"]


def test_an_answer_that_is_cancelled_leaves_only_what_was_said(
    runs_ahead, models, tmp_path, monkeypatch
):
    n, answers = 4 * N, []
    with engine_on(models.of("llama"), tmp_path / "off") as engine:
        known = tokens_of(run(engine, [ask(PROMPTS[0], n)])[0].choices[0])
    Oracle(monkeypatch, [(PROMPTS[0], known)])

    def width(*_):
        answers[0].cancel()
        return 8

    with drafting(models.of("llama"), tmp_path / "on") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(DraftGate, "width", width)
            with held(engine):
                answers.append(engine.submit(ask(PROMPTS[0], n)))
            with pytest.raises(Cancelled):
                answers[0].result()
        (again,) = run(engine, [ask([*PROMPTS[0], *known[:N]], n - N)])
    assert tokens_of(again.choices[0]) == known[N:]


def test_a_request_can_turn_drafts_off(models, tmp_path, monkeypatch):
    Oracle(monkeypatch, [(PROMPTS[0], [1] * N)])
    with drafting(models.of("llama"), tmp_path) as engine:
        (answer,) = run(engine, [ask(PROMPTS[0], N, speculation=False)])
    assert answer.receipt.speculation is None


@pytest.mark.parametrize("policy", [Policy.READ_WRITE, Policy.NO_STORE])
def test_every_device_counts_the_same_steps(policy, runs_ahead, models, tmp_path, monkeypatch):
    """In a batch that gets no drafts, too; and the gate knows that it missed them."""
    monkeypatch.setattr(scheduler, "MAX_DRAFTED_ROWS", 0)
    with drafting(models.of("llama"), tmp_path) as engine:
        costs = engine.lane_of().gate.costs
        costs.saw_end_ahead(ONE_ROW, 1.0, True)
        (answer,) = run(engine, [ask(PROMPTS[0], N, policy=policy)])
        assert costs._ahead is None
    assert answer.receipt.speculation == {"steps": N, "drafted": 0, "accepted": 0}


def test_a_step_in_which_nothing_is_fed_is_not_measured(models, tmp_path):
    """The last one, if nobody keeps the answer."""
    with drafting(models.of("llama"), tmp_path) as engine:
        run(engine, [ask(PROMPTS[0], 1, policy=Policy.NO_STORE)])
        assert not engine.lane_of().gate.costs._times
        run(engine, [ask(PROMPTS[0], 2, policy=Policy.NO_STORE)])
        (times,) = engine.lane_of().gate.costs._times.values()
    assert len(times) == 1


@pytest.mark.parametrize("others_ran", [False, True])
def test_steps_between_those_of_another_model_are_not_measured(
    others_ran, models, tmp_path, monkeypatch
):
    monkeypatch.setattr(batches, "works_beside_host", lambda: True)
    monkeypatch.setattr(DeviceLock, "others_ran", lambda _: others_ran)
    with drafting(models.of("llama"), tmp_path) as engine:
        run(engine, [ask(PROMPTS[0], 8)])
        assert bool(engine.lane_of().gate.costs._times) != others_ran


@pytest.mark.parametrize("architecture", ["mamba2", "falcon_h1", "qwen3_next"])
def test_a_state_takes_nothing_back_and_is_fed_what_was_right_again(
    architecture, runs_ahead, models, tmp_path, monkeypatch
):
    """Only while a sequence runs alone."""
    model, wishes = models.of(architecture), SAMPLINGS["seeded" if runs_ahead else "greedy"]
    requests = requests_of(PROMPTS[:3], **wishes)
    with engine_on(model, tmp_path / "off") as engine:
        plain = [*run(engine, requests[:1]), *run(engine, requests[1:])]
    Oracle(monkeypatch, zip(PROMPTS, [c[3] for c in told(plain)], strict=False))
    with drafting(model, tmp_path / "on") as engine:
        (alone,) = run(engine, requests[:1])
        later = run(engine, [ask([*PROMPTS[0], *told([alone])[0][3], 1], 2)])[0]
        together = run(engine, requests[1:])
    assert told([alone, *together]) == told(plain)
    counts = alone.receipt.speculation
    assert counts["drafted"] > counts["accepted"] > 3
    assert counts["steps"] + counts["accepted"] == N
    assert later.receipt.recomputed <= 2
    assert together[-1].receipt.speculation["drafted"] == 0


def test_a_model_is_tried_when_nobody_waits_and_drafts_begin_after_that(
    models, tmp_path, monkeypatch
):
    with engine_on(models.of("llama"), tmp_path / "off") as engine:
        known = tokens_of(run(engine, [ask(PROMPTS[0], N)])[0].choices[0])
    Oracle(monkeypatch, [(PROMPTS[0], known)])
    environment = {"KEEPWARM_SPECULATION": "auto"}
    home = tmp_path / "on"
    with engine_on(models.of("llama"), home, environment=environment, tries_padding=True) as engine:
        (first,) = run(engine, [ask(PROMPTS[0], N)])
        wait_until(lambda: engine.lane_of().sharing.allowed)
        (second,) = run(engine, [ask(PROMPTS[0], N)])
    assert first.receipt.speculation["drafted"] == 0
    assert second.receipt.speculation["accepted"] > 0
    assert tokens_of(first.choices[0]) == tokens_of(second.choices[0]) == known


def test_nothing_is_drafted_while_products_are_left_to_measure_but_while_some_are_to_compile(
    models, tmp_path, monkeypatch
):
    """Then steps cost something else."""
    Oracle(monkeypatch, [(PROMPTS[0], [1] * N)])
    trials = SimpleNamespace(
        n_left=1, is_measured=False, run=lambda: (x for x in ()), save=lambda: None
    )
    with drafting(replace(models.of("llama"), trials=trials), tmp_path) as engine:
        (first,) = run(engine, [ask(PROMPTS[0], N)])
        assert not engine.lane_of().gate.costs._times
        trials.is_measured = True
        (second,) = run(engine, [ask(PROMPTS[0], N)])
        assert engine.lane_of().gate.costs._times
    assert first.receipt.speculation["drafted"] == 0
    assert second.receipt.speculation["drafted"] > 0


def test_a_long_answer_is_kept_at_intervals_whatever_steps_give(models, tmp_path, monkeypatch):
    n = 2 * BLOCK_TOKENS
    with engine_on(models.of("llama"), tmp_path / "off") as engine:
        known = tokens_of(run(engine, [ask(PROMPTS[1], n)])[0].choices[0])
    Oracle(monkeypatch, [(PROMPTS[1], known)], wrong=0.0)
    monkeypatch.setattr(DraftGate, "width", lambda *_: 8)
    kept = []
    capture = Capture.capture
    monkeypatch.setattr(
        Capture,
        "capture",
        lambda own, caches, n, *a, **k: kept.append(n) or capture(own, caches, n, *a, **k),
    )
    with drafting(models.of("llama"), tmp_path / "on") as engine:
        run(engine, [ask(PROMPTS[1], n)])
    assert any(BLOCK_TOKENS <= n_tokens < BLOCK_TOKENS + 8 for n_tokens in kept)


@pytest.mark.parametrize("place", ["_feed_drafts", "accept", "settle"])
def test_a_step_with_drafts_that_fails_is_the_last_one(
    place, runs_ahead, models, tmp_path, monkeypatch
):
    works = getattr(Batch, place)

    def fail(batch, *given):
        if batch._fed or given:
            raise RuntimeError("a fault")
        return works(batch, *given)

    with engine_on(models.of("llama"), tmp_path / "off") as engine:
        known = tokens_of(run(engine, [ask(PROMPTS[0], N)])[0].choices[0])
    Oracle(monkeypatch, [(PROMPTS[0], known)])
    monkeypatch.setattr(DraftGate, "width", lambda gate, *_: 4 if gate.is_open else 1)
    monkeypatch.setattr(Batch, place, fail)
    with drafting(models.of("llama"), tmp_path / "on") as engine:
        (answer,) = run(engine, [ask(PROMPTS[0], N)])
        assert not engine.lane_of().gate.is_open
        monkeypatch.setattr(RowDrafts, "propose", None)  # nothing is searched either
        (later,) = run(engine, [ask(PROMPTS[0], N)])
    assert tokens_of(answer.choices[0]) == tokens_of(later.choices[0]) == known


def test_tokens_that_repeat_are_proposed_by_the_longest_match():
    text = SeenTexts([1, 2, 3, 50, 9, 1, 2, 3, 60, 8, 7, 1, 2, 3])
    assert text.propose() == Proposal(3, [60, 8, 7, 1, 2, 3])
    text = SeenTexts([9, 1, 2, 3, 50, 4, 1, 2, 3, 60, 9, 1, 2, 3])
    assert text.propose() == Proposal(4, [50, 4, 1, 2, 3, 60, 9, 1, 2, 3])
    text.append(50)
    assert text.propose().tokens[:2] == [4, 1]
    assert SeenTexts([1, 2, 3, 4, 5]).propose() is None
    assert SeenTexts([]).propose() is None


def slow_search(own, others):
    """The longest match, in the first text that has it, and its latest place there."""
    best = None
    for text in [own, *(other for other in others if own[: len(other)] != other)]:
        matches = [
            (n, end)
            for end in range(len(text))
            for n in range(MIN_MATCH, min(MAX_MATCH, end, len(own)) + 1)
            if text[end - n : end] == own[len(own) - n :]
        ]
        n, end = max(matches, default=(0, 0))
        if n > (best.n_matched if best else 0):
            best = Proposal(n, text[end : end + MAX_PROPOSED])
    return best


def test_what_is_proposed_is_what_a_slow_search_finds():
    source = random.Random(4)

    def text(n_most):
        # Few ids, and bytes that are equal across the borders of tokens.
        return [source.choice([0, 1, 256, 257, 65536]) for _ in range(source.randrange(n_most))]

    for n_most in (MAX_MATCH, 60):
        for _ in range(200):
            own = text(n_most)
            around = [*text(9), *own, *text(9)]  # all of it may be inside another text
            others = [text(60), around, text(60)][: source.randrange(4)]
            found = SeenTexts(own, lambda others=others: map(as_text, others)).propose()
            assert found == slow_search(own, others)


def test_other_texts_are_searched_where_the_conversation_has_no_longer_match():
    own = [7, 1, 2, 3, 50, 51, 9, 1, 2, 3]
    others = [as_text(text) for text in ([9, 1, 2, 3, 60, 61], [5, 1, 2, 3, 70, 71])]
    assert SeenTexts(own, lambda: others).propose() == Proposal(4, [60, 61])
    assert SeenTexts(own, lambda: others[1:]).propose().tokens[:2] == [50, 51]
    # An earlier turn is not searched, however long, and takes no other text's place.
    long = [*[0] * MAX_OTHER_TOKENS, *own]
    recent = RecentPrompts()
    recent.remember("ours", [9, 1, 2, 3, 60, 61])
    recent.remember("ours", long[:-1])
    drafts = DraftGate(recent).drafts_for(long, (), "ours")
    assert drafts.propose() == Proposal(4, [60, 61])
    # Only so much is searched.
    far = as_text([9, 1, 2, 3, 60, *[0] * MAX_OTHER_TOKENS])
    assert SeenTexts(own, lambda: [far]).propose().tokens[:2] == [50, 51]


def test_drafts_come_from_the_tenants_other_texts_and_from_nobody_elses(models, tmp_path):
    first, (a, b, c) = PROMPTS[0], PROMPTS[0][-3:]
    with drafting(models.of("llama"), tmp_path) as engine:
        run(engine, [ask(first, 4, tenant="ada"), ask(PROMPTS[2], 4, policy=Policy.NO_STORE)])
        gate, kv = engine.lane_of().gate, KVOptions()

        def proposed(prompt, tenant):
            drafts = gate.drafts_for(prompt, (), (kv, tenant))
            return engine.call(drafts.propose).result()

        found = proposed([9, a, b, c], "ada")
        assert found.n_matched == 3
        assert len(found.tokens) == 4
        assert proposed([9, a, b, c], "bob") is None
        assert proposed([9, a, b, c], "") is None
        assert proposed([9, *PROMPTS[2][-3:]], "") is None
        engine._texts.forget(())
        assert proposed([9, a, b, c], "ada") is None


@pytest.mark.parametrize("policy", Policy)
def test_a_no_store_request_reads_no_other_texts(policy, models, tmp_path):
    with drafting(models.of("llama"), tmp_path) as engine:
        run(engine, [ask(PROMPTS[0], 4)])
        prepared = engine.prepare(ask([9, *PROMPTS[0][-3:]], 4, policy=policy))
        job = Job(prepared.request, prepared, engine.lane_of(), Answer(lambda _: None))
        found = engine.call(_drafts_of(job).propose).result()
    assert (found is None) == (policy is Policy.NO_STORE)


def test_drafts_that_were_not_fed_count_too():
    rates = HitRates()
    drafts = RowDrafts(SeenTexts([1, 2, 3, 4, 5, 6, 1, 2, 3]), rates)
    before = rates.expected(DRAFT, 3)
    for token in (4, 5, 99):
        assert drafts.propose() is not None or token == 99
        drafts.saw(token)
    after = rates.expected(DRAFT, 3)
    assert after != before
    assert rates._seen[MIN_MATCH, 0] == (1, 1)
    assert rates._seen[MIN_MATCH, 1] == (1, 1)
    assert rates._seen[MIN_MATCH, 2] == (0, 1)


def test_a_proposal_goes_on_while_its_tokens_come():
    text = [*range(100), 0, 1, 2]
    drafts = RowDrafts(SeenTexts(text), HitRates())
    first = drafts.propose()
    assert first == Proposal(3, list(range(3, 3 + MAX_PROPOSED)))
    drafts.saw(3)
    assert drafts.propose() == Proposal(4, first.tokens[1:])
    drafts.saw(77)  # not 4
    assert drafts.propose() is None


def test_a_grammar_checks_no_more_of_a_proposal_than_can_be_fed():
    checked = []

    def fitted(tokens):
        checked.append(len(tokens))
        return tokens

    drafts = RowDrafts(SeenTexts([*range(100), 0, 1, 2]), HitRates())
    first = drafts.propose(fitted)
    assert (checked, len(first.tokens)) == ([MAX_DRAFT], MAX_PROPOSED)
    assert drafts.propose(lambda tokens: tokens[:2]) == Proposal(3, first.tokens[:2])


def test_what_a_grammar_forces_stays_so_while_it_comes():
    drafts, forced = RowDrafts(SeenTexts([]), HitRates()), list(range(3 * MAX_DRAFT))
    assert drafts.propose(lambda _: forced) == Proposal(FORCED, forced)
    drafts.saw(0)
    assert drafts.propose() == Proposal(FORCED, forced[1:])


def test_a_step_that_runs_ahead_costs_the_time_between_two_ends():
    """The first after a step that did not is short, and one with other work between is long."""
    costs, size = StepCosts(), BatchSize(2, 100)
    for now in (1.0, 2.0):
        costs.saw_end_ahead(size, now, True)
    assert costs.get(size, 1) is None  # one of two that it takes
    for now in (3.0, 4.0):
        costs.saw_end_ahead(size, now, True)
    assert costs.get(size, 1) == 1.0
    costs.saw(size, 4, 0.5)
    costs.saw_end_ahead(size, 4.1, True)  # after a step with drafts
    costs.saw_end_ahead(size, 9.0, False)  # disturbed
    costs.saw_end_ahead(BatchSize(1, 100), 9.1, True)  # a row has left
    costs.saw_end_ahead(size, 9.2, True)
    costs.missed_step()
    costs.saw_end_ahead(size, 9.9, True)
    assert list(costs._times[size.key(1)]) == [1.0, 1.0, 1.0]
    assert BatchSize(1, 100).key(1) not in costs._times


def test_a_batch_that_runs_ahead_waits_for_its_tokens_only_while_a_match_holds(
    models, tmp_path, monkeypatch
):
    monkeypatch.setattr(batches, "works_beside_host", lambda: True)
    prompt = PROMPTS[0]
    with engine_on(models.of("llama"), tmp_path / "off") as engine:
        known = tokens_of(run(engine, [ask(prompt, N)])[0].choices[0])
    fed = []
    feed = Batch.feed

    def watch(batch, drafts=None):
        width = feed(batch, drafts)
        fed.append("ahead" if drafts is None else width)
        return width

    monkeypatch.setattr(Batch, "feed", watch)
    # Nothing is proposed for the first and for the last third.
    Oracle(monkeypatch, [(prompt, known)], wrong=0.0)
    found = Oracle._propose
    monkeypatch.setattr(
        Oracle,
        "_propose",
        lambda own, rest: found(own, rest) if N // 3 < N - len(rest) < 2 * N // 3 else None,
    )
    monkeypatch.setattr(DraftGate, "width", lambda gate, drafts, size: 4 if any(drafts) else 1)
    with drafting(models.of("llama"), tmp_path / "on") as engine:
        (answer,) = run(engine, [ask(prompt, N)])
    assert tokens_of(answer.choices[0]) == known
    wide = [i for i, width in enumerate(fed) if width == 4]
    assert len(wide) > 2
    assert wide == list(range(wide[0], wide[-1] + 1))
    # The first token of an answer is not waited for, nor is the one after the match broke.
    assert fed[1 : wide[0]] == ["ahead"] * (wide[0] - 1)
    assert fed[wide[-1] + 2 :] == ["ahead"] * (len(fed) - wide[-1] - 2)
