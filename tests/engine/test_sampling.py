"""Tokens are chosen as asked, row by row, and a row's neighbours never change its choice."""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from keepwarm.engine.sampling import Sampler, logprobs_of, sample, token_info
from keepwarm.errors import BadInput
from keepwarm.text.request import Sampling, TokenInfo, TopLogprob
from keepwarm.text.sampling_rules import DrawRules, check_sampling

N_VOCAB = 24
LOGITS = np.random.default_rng(5).normal(0, 2, N_VOCAB).astype(np.float32)
quick = settings(max_examples=40, deadline=None)


def draws(sampling, n_draws=4000, logits=LOGITS):
    """One draw from each of many seeds, all in one call."""
    samplers = [Sampler(replace(sampling, seed=seed), len(logits)) for seed in range(n_draws)]
    rows = mx.broadcast_to(mx.array(logits), (n_draws, len(logits)))
    return np.array(sample(samplers, rows))


def softmax(scores):
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()


def reference(sampling, logits=LOGITS):
    """The distribution by mlx-lm's own filters, in its order, with the temperature last."""
    sampling = DrawRules().of(sampling)
    logprobs = logprobs_of(mx.array(logits)[None])
    if sampling.top_p < 1:
        logprobs = apply_top_p(logprobs, sampling.top_p)
    if sampling.min_p:
        logprobs = apply_min_p(logprobs, sampling.min_p)
    if 0 < sampling.top_k < len(logits):
        logprobs = apply_top_k(logprobs, sampling.top_k)
    return softmax(np.array(logprobs[0], np.float64) / sampling.temperature)


def is_drawn_from(tokens, probabilities):
    """Chi-square at about four standard deviations; rare tokens are counted together."""
    expected = probabilities * len(tokens)
    seen = np.bincount(tokens, minlength=len(expected))
    if seen[expected == 0].any():
        return False
    common = expected >= 5
    expected = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    seen = np.append(seen[common], seen[~common].sum())
    n_free = max(len(expected) - 2, 1)
    return bool(((seen - expected) ** 2 / expected).sum() < n_free + 4 * math.sqrt(2 * n_free))


FILTERS = {
    "none": Sampling(temperature=1.0),
    "hot": Sampling(temperature=1.7),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "min_p": Sampling(temperature=1.0, min_p=0.1),
    "top_p, hot": Sampling(temperature=1.5, top_p=0.7),
    "all": Sampling(temperature=0.7, top_k=6, top_p=0.9, min_p=0.02),
    "more than there are": Sampling(temperature=1.0, top_k=1000),
}


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)
def test_draws_have_the_distribution_that_mlx_lm_gives(sampling):
    assert is_drawn_from(draws(sampling), reference(sampling))


@pytest.mark.parametrize(
    ("drawn", "claimed"), [("none", "hot"), ("none", "top_p"), ("top_k", "all"), ("min_p", "none")]
)
def test_the_test_of_distributions_can_fail(drawn, claimed):
    """Control."""
    assert not is_drawn_from(draws(FILTERS[drawn]), reference(FILTERS[claimed]))


def test_draws_of_one_seed_are_independent():
    """The chain of one sequence, not only the first draw of many, has the distribution."""
    sampling = Sampling(temperature=1.0, seed=3)
    tokens = np.array(tokens_of(Sampler(sampling, N_VOCAB), [mx.array(LOGITS)] * 2000))
    assert is_drawn_from(tokens, reference(sampling))
    pairs = (tokens[:-1] == tokens[1:]).mean()
    assert abs(pairs - (reference(sampling) ** 2).sum()) < 0.04


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.5, 1e30]),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 40),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(-(2**63), 2**64 - 1),
)


def tokens_of(sampler, rows):
    return [chosen(sampler, row) for row in rows]


def chosen(sampler, row):
    token = sample([sampler], row[None]).item()
    sampler.accept(token)
    return token


@quick
@given(st.lists(samplings, min_size=1, max_size=5), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_neighbours_never_change_a_rows_tokens(neighbours, place, seed):
    """The same seed gives the same tokens alone and among others that come and go."""
    mine = Sampling(temperature=1.0, top_p=0.95, min_p=0.01, seed=seed)
    logits = mx.random.normal((4, N_VOCAB), key=mx.random.key(seed)) * 3
    alone = tokens_of(Sampler(mine, N_VOCAB), logits)
    me, others = Sampler(mine, N_VOCAB), [Sampler(other, N_VOCAB) for other in neighbours]
    among = []
    for row in logits:
        here = min(place, len(others))
        batch = [*others[:here], me, *others[here:]]
        rows = mx.random.normal((len(batch), N_VOCAB), key=mx.random.key(1))
        rows[here] = row
        among.append(sample(batch, rows)[here].item())
        me.accept(among[-1])
        others = others[1:]
    assert among == alone


@quick
@given(samplings, st.integers(0, 2**32 - 1))
def test_only_tokens_that_the_filters_leave_are_drawn(sampling, seed):
    logits = np.random.default_rng(seed).normal(0, 3, N_VOCAB).astype(np.float32)
    logits[seed % N_VOCAB] = -np.inf
    tokens = set(draws(sampling, 64, logits).tolist())
    if sampling.temperature == 0 or sampling.top_k == 1:
        assert tokens == {int(logits.argmax())}
    else:
        allowed = reference(replace(sampling, temperature=1.0), logits)
        assert tokens <= set(np.flatnonzero(allowed).tolist())


def test_greedy_and_drawn_rows_mix():
    rows = mx.random.normal((6, N_VOCAB), key=mx.random.key(0))
    hot = Sampling(temperature=5.0, seed=1)
    samplers = [Sampler(Sampling() if i % 2 else hot, N_VOCAB) for i in range(6)]
    tokens = sample(samplers, rows).tolist()
    assert tokens[1::2] == mx.argmax(rows, axis=-1).tolist()[1::2]
    assert tokens[::2] == [sample([Sampler(hot, N_VOCAB)], row[None]).item() for row in rows[::2]]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_equal_logits_of_half_precision_are_no_obstacle(dtype):
    """Filters are thresholds: tokens that are equal are kept or dropped together."""
    logits = mx.array([[1.0, 1.0, 1.0, 0.0]]).astype(dtype)
    samplers = [Sampler(Sampling(temperature=1.0, top_k=2, seed=i), 4) for i in range(64)]
    tokens = sample(samplers, mx.broadcast_to(logits, (64, 4)))
    assert set(tokens.tolist()) == {0, 1, 2}


def test_the_coldest_draw_in_half_precision_is_the_best_token():
    logits = mx.log(mx.array([[0.1, 0.9]])).astype(mx.float16)
    assert sample([Sampler(Sampling(temperature=1e-6, seed=0), 2)], logits).item() == 1


def test_without_a_seed_every_sequence_draws_its_own():
    flat = mx.zeros((8, 4096))
    assert len(set(tokens_of(Sampler(Sampling(temperature=1.0), 4096), flat))) > 1
    fresh = [Sampler(Sampling(temperature=1.0), 4096) for _ in range(8)]
    assert len(set(sample(fresh, flat).tolist())) > 1


def test_a_draw_that_is_made_again_is_the_same_draw():
    """What was drawn and lost, because something else failed, costs nobody a key."""
    sampling, flat = Sampling(temperature=1.0, seed=7), mx.zeros((6, 4096))
    calm, shaken = tokens_of(Sampler(sampling, 4096), flat), []
    sampler = Sampler(sampling, 4096)
    for row in flat:
        lost = [sample([sampler], row[None]).item() for _ in range(2)]
        shaken.append(chosen(sampler, row))
        assert set(lost) == {shaken[-1]}
    assert shaken == calm
    assert len(set(calm)) > 1


def test_the_answers_of_one_request_differ_and_repeat():
    sampling, flat = Sampling(temperature=1.0, seed=11), mx.zeros((4, 4096))
    first, second = (
        sample([Sampler(sampling, 4096, choice=i) for i in range(4)], flat).tolist()
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 4
    assert first[0] == sample([Sampler(sampling, 4096)], flat[:1]).item()


# Penalties and bias


def adjusted(sampler, logits=LOGITS):
    return np.array(sampler.adjust(mx.array(logits)[None])[0])


def penalised(sampling, prompt, answer, logits):
    """What every textbook says, token by token."""
    scores = logits.astype(np.float64).copy()
    for token in {*prompt, *answer}:
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    for token in set(answer):
        scores[token] -= sampling.presence_penalty
        scores[token] -= sampling.frequency_penalty * answer.count(token)
    return scores


tokens_in = st.lists(st.integers(0, N_VOCAB - 1), max_size=30)


@quick
@given(
    st.builds(
        Sampling,
        repetition_penalty=st.sampled_from([1.0, 0.8, 1.3, 2.0]),
        presence_penalty=st.sampled_from([0.0, -1.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, -0.3, 0.25]),
        logit_bias=st.dictionaries(st.integers(0, N_VOCAB - 1), st.floats(-100, 100), max_size=4),
    ),
    tokens_in,
    tokens_in,
)
def test_penalties_and_bias_are_what_a_plain_loop_gives(sampling, prompt, answer):
    sampler = Sampler(sampling, N_VOCAB, prompt)
    for i, token in enumerate(answer):
        if i % 7 == 0:
            expected = penalised(sampling, prompt, answer[:i], LOGITS)
            np.testing.assert_allclose(adjusted(sampler), expected, rtol=1e-5, atol=1e-4)
        sampler.accept(token)
    expected = penalised(sampling, prompt, answer, LOGITS)
    np.testing.assert_allclose(adjusted(sampler), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        (Sampling(), True),
        (Sampling(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1, seed=1, top_logprobs=5), True),
        (Sampling(repetition_penalty=1.1), False),
        (Sampling(presence_penalty=0.1), False),
        (Sampling(frequency_penalty=-0.1), False),
        (Sampling(logit_bias={3: 0.5}), False),
    ],
)
def test_a_row_without_rules_is_plain(sampling, plain):
    sampler = Sampler(sampling, N_VOCAB)
    assert sampler.is_plain is plain
    assert not sampler.is_finished
    if plain:
        assert (adjusted(sampler) == LOGITS).all()


def test_a_bias_bans_and_forces():
    best = int(LOGITS.argmax())
    banned = Sampler(Sampling(logit_bias={best: -100}), N_VOCAB)
    forced = Sampler(Sampling(logit_bias={7: 100}, temperature=1.0), N_VOCAB)
    assert adjusted(banned).argmax() != best
    assert sample([forced], forced.adjust(mx.array(LOGITS)[None])).item() == 7


def test_a_stop_token_is_no_part_of_the_answer():
    sampler = Sampler(Sampling(presence_penalty=1.0), N_VOCAB, stop_tokens={2})
    sampler.accept(2)
    assert (adjusted(sampler) == LOGITS).all()
    sampler.accept(3)
    assert adjusted(sampler)[3] == LOGITS[3] - 1


# Log-probabilities


def test_logprobs_are_a_log_softmax_in_fp32():
    rows = mx.random.normal((3, N_VOCAB), key=mx.random.key(2)).astype(mx.bfloat16)
    logprobs = logprobs_of(rows)
    assert logprobs.dtype == mx.float32
    expected = [np.log(softmax(np.array(row.astype(mx.float32), np.float64))) for row in rows]
    np.testing.assert_allclose(np.array(logprobs), expected, atol=1e-5)


def test_the_likeliest_tokens_come_best_first():
    row = np.log(np.array([0.1, 0.4, 0.2, 0.2, 0.1], np.float32))
    info = token_info(row, 4, 3)
    assert info.token == 4
    assert info.logprob == pytest.approx(math.log(0.1))
    assert [t.token for t in info.top] == [1, 2, 3]
    assert info.top[0] == TopLogprob(1, pytest.approx(math.log(0.4)))
    assert token_info(row, 4, 0) == TokenInfo(4, info.logprob, ())
    assert token_info(row, 4, None) == TokenInfo(4)
    assert len(token_info(row, 4, 20).top) == 5


def test_a_logprob_is_always_a_number_that_json_knows():
    info = token_info(np.array([0.0, -np.inf, -np.inf], np.float32), 1, 2)
    assert info == TokenInfo(1, -9999.0, (TopLogprob(0, 0.0), TopLogprob(1, -9999.0)))


# Numbers that mean nothing

BAD = [
    *({"temperature": v} for v in (-0.1, math.nan, math.inf, "hot", True)),
    *({"top_p": v} for v in (0, -1, 1.01, math.nan)),
    *({"min_p": v} for v in (-0.1, 1.1, math.nan)),
    *({"top_k": v} for v in (-1, 1.5)),
    *({"repetition_penalty": v} for v in (0, -1, math.inf, 1e-40)),
    *({"presence_penalty": v} for v in (math.nan, -math.inf, 10**400, -1e300)),
    *({"frequency_penalty": v} for v in (math.nan, "1")),
    *({"max_tokens": v} for v in (-1, -3, 2.5)),
    *({"seed": v} for v in (2**64, -(2**63) - 1, 0.5)),
    *({"top_logprobs": v} for v in (-1, 21, 1.0)),
    *({"logit_bias": v} for v in ({24: 1}, {-1: 1}, {"5": 1}, {5: 101}, {5: math.nan})),
    *({"stop": v} for v in (("a", ""), ("x",) * 17, (7,))),
]


@pytest.mark.parametrize("wrong", BAD, ids=str)
def test_a_number_that_means_nothing_is_refused_in_one_sentence(wrong):
    with pytest.raises(BadInput) as refused:
        check_sampling(Sampling(**wrong), N_VOCAB)
    message = str(refused.value)
    assert message.count(". ") == 0
    assert message.endswith(".")
    assert next(iter(wrong)).replace("stop", "stop string") in message


def test_whatever_means_something_is_taken():
    check_sampling(Sampling(), N_VOCAB)
    edges = Sampling(
        max_tokens=1,
        temperature=50,
        top_p=1,
        top_k=10**6,
        min_p=1,
        repetition_penalty=0.1,
        presence_penalty=-7,
        frequency_penalty=9.5,
        logit_bias={0: -100, 23: 100},
        seed=-(2**63),
        top_logprobs=20,
        stop=("x",) * 16,
    )
    check_sampling(edges, N_VOCAB)
    sampler = Sampler(edges, N_VOCAB)
    assert sample([sampler], sampler.adjust(mx.array(LOGITS)[None])).item() == 23
