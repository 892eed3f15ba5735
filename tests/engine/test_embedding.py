"""Vectors of prompts: those of a plain forward pass, however much of a prompt was restored."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from keepwarm.engine.prefill import unit_vector
from keepwarm.errors import BadInput, UnsupportedModel
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import KVOptions, Request, Sampling
from tests.kit.engines import ask, engine_on, held
from tests.kit.runs import FedCounter, prompt_of


class Whole(FedCounter):
    """A model of which the backbone's calls are counted."""

    def __init__(self, module):
        super().__init__(FedCounter(module.model))
        self.shapes, self._module = self.model.shapes, module

    def __call__(self, *args, **kwargs):
        return self._module(*args, **kwargs)

    def __getattr__(self, name):
        if name == "_module" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._module, name)


def model_of(models, name):
    return replace(models.of(name), module=Whole(models.module(name)))


def embed(engine, prompt, **options):
    asked = {"policy": Policy.READ_ONLY, "sampling": Sampling(max_tokens=0), **options}
    return engine.submit(Request(prompt=list(prompt), embed=True, **asked))


def plain(models, name, prompt):
    """By one forward pass without a cache."""
    row = np.array(models.module(name).model(mx.array([list(prompt)]))[0, -1])
    return row / np.linalg.norm(row)


@pytest.mark.parametrize(
    ("name", "n_shared", "lengths"),
    [("qwen3", 300, (2, 40, 333)), ("gemma3_text", 70, (2, 30)), ("qwen3_next", 40, (2, 20))],
)
def test_a_vector_is_that_of_a_plain_forward_pass_cold_and_restored(
    models, tmp_path, name, n_shared, lengths
):
    instruction = prompt_of(n_shared, seed=1)
    prompts = [instruction + prompt_of(n, seed=n) for n in lengths]
    model = model_of(models, name)
    with engine_on(model, tmp_path) as engine:
        cold = [embed(engine, prompt).result() for prompt in prompts]
        assert not any(each.receipt.cached_tokens for each in cold), "texts are not kept"
        embed(engine, instruction, policy=Policy.READ_WRITE).result()
        model.module.shapes.clear()
        with held(engine):
            answers = [embed(engine, prompt) for prompt in prompts]
        warm = [answer.result() for answer in answers]
    assert {each.receipt.cached_tokens for each in warm} == {n_shared}
    assert model.module.fed == sum(each.receipt.recomputed for each in warm)
    for prompt, *found in zip(prompts, cold, warm, strict=True):
        expected = plain(models, name, prompt)
        for each in found:
            assert each.choices == ()
            assert each.vector.dtype == np.float32
            np.testing.assert_allclose(each.vector, expected, atol=2e-6)
    assert np.abs(warm[0].vector - warm[1].vector).max() > 0.01  # control


def test_an_answer_goes_on_beside_vectors_and_neither_changes(models, tmp_path):
    prompt, asked = (
        prompt_of(200),
        Request(prompt=prompt_of(50, seed=3), sampling=Sampling(max_tokens=12, temperature=0)),
    )
    model = model_of(models, "qwen3")
    with engine_on(model, tmp_path) as engine:
        alone = engine.submit(replace(asked, policy=Policy.NO_STORE)).result()
        with held(engine):
            answer = engine.submit(replace(asked, policy=Policy.NO_STORE))
            vectors = [embed(engine, [*prompt, i]) for i in range(3)]
        beside = answer.result()
        found = [each.result().vector for each in vectors]
    assert beside.choices[0].text == alone.choices[0].text
    for i, vector in enumerate(found):
        np.testing.assert_allclose(vector, plain(models, "qwen3", [*prompt, i]), atol=2e-6)


def test_what_is_embedded_is_no_miss(models, tmp_path):
    """Texts of an index have phrases in common, and none of them is to be kept."""
    prompt = prompt_of(120)
    changed = prompt[:50] + prompt_of(8, seed=9) + prompt[50:]
    with engine_on(model_of(models, "qwen3"), tmp_path) as engine:
        engine.submit(Request(prompt=prompt, sampling=Sampling(max_tokens=2))).result()
        embed(engine, changed).result()
        assert engine.ledger.misses() == []
        engine.submit(Request(prompt=changed, sampling=Sampling(max_tokens=2))).result()
        engine.wait_until_saved()
        assert len(engine.ledger.misses()) == 1  # control


def test_a_prepared_request_runs_as_it_was_prepared(models, tmp_path):
    with engine_on(model_of(models, "qwen3"), tmp_path, kv=KVOptions(kv_bits=4)) as engine:
        request = Request(prompt="the dog", embed=True, exact=True, policy=Policy.READ_ONLY)
        prepared = engine.prepare(request)
        found = engine.submit(prepared).result()
    assert found.receipt.exact
    np.testing.assert_allclose(found.vector, plain(models, "qwen3", prepared.tokens), atol=2e-6)


def test_what_cannot_be_embedded_is_refused(models):
    with pytest.raises(BadInput, match="embed needs a prompt"):
        Request(messages=[{"role": "user", "content": "a"}], embed=True)
    with pytest.raises(UnsupportedModel, match="hidden states of mamba"):
        _ = replace(models.of("mamba"), module=models.module("mamba")).backbone
    with pytest.raises(UnsupportedModel, match="hidden states of this"):
        unit_vector(mx.zeros((1, 128)), 128)
    assert not unit_vector(mx.zeros((1, 64)), 128).any()  # not NaN


def test_a_model_with_its_head_inside_fails_to_embed_alone(models, tmp_path):
    """As mlx-lm's gpt_neox: answers beside it go on."""
    with engine_on(models.of("gpt_neox"), tmp_path) as engine:
        with held(engine):
            other = engine.submit(ask(prompt_of(30), 8))
            vector = embed(engine, prompt_of(20, seed=1))
        with pytest.raises(UnsupportedModel, match="hidden states of this"):
            vector.result()
        assert len(other.result().choices[0].tokens) == 8
