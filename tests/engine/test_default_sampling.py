"""Requests without sampling parameters get the engine's, everywhere alike."""

from dataclasses import replace

import pytest

from keepwarm import Session
from keepwarm.text.request import Request, Sampling
from keepwarm.text.sampling_rules import DrawRules
from tests.kit.engines import Models, ask, engine_on, tokens_of

PROMPT = [5, 6, 7, 8]
MAKERS = {"do_sample": True, "temperature": 5.0, "top_k": 40}
RULES = DrawRules(temperature=5.0, top_k=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models")).of("llama")


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    makers = replace(model, generation_config=MAKERS)
    with engine_on(makers, tmp_path_factory.mktemp("home")) as engine:
        yield engine


def said(engine, **sampling):
    request = Request(prompt=PROMPT, sampling=Sampling(max_tokens=8, **sampling))
    return tokens_of(engine.submit(request).result().choices[0])


def test_a_silent_request_is_drawn_as_the_makers_meant_it(engine):
    assert engine.sampling == RULES
    drawn = said(engine, seed=1)
    assert drawn == said(engine, seed=1, **RULES._asdict())
    assert drawn != said(engine, seed=1, temperature=0)


def test_what_holds_is_in_the_prepared_request(engine):
    sampling = engine.prepare(Request(prompt=PROMPT)).request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (5.0, 40, 1.0)
    assert engine.prepare(ask(PROMPT)).request.sampling.temperature == 0


def test_a_session_is_no_exception(engine):
    def reply(**sampling):
        return Session(engine).respond("Hello", sampling=Sampling(8, seed=1, **sampling)).text

    assert reply() == reply(**RULES._asdict())
    assert reply() != reply(temperature=0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KEEPWARM_SAMPLING": "greedy"}, DrawRules()),
        ({"KEEPWARM_TEMPERATURE": "0"}, RULES._replace(temperature=0.0)),
    ],
)
def test_the_settings_reach_the_library(model, tmp_path, environment, expected):
    makers = replace(model, generation_config=MAKERS)
    with engine_on(makers, tmp_path, environment=environment) as engine:
        assert engine.sampling == expected
