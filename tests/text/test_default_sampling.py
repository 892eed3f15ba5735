"""What holds where a request is silent: the setting, the model's file, greedy decoding."""

import logging
from dataclasses import fields

import pytest

from keepwarm import config
from keepwarm.text.request import Sampling
from keepwarm.text.sampling_rules import DrawRules, default_rules

MAKERS = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "eos_token_id": [2],
}
RULES = DrawRules(0.6, 0.95, 20, 0.01, 1.05)


def rules(generation_config, **settings):
    return default_rules(generation_config, config.load({}, **settings))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, DrawRules()),
        ({"eos_token_id": 2}, DrawRules()),
        (MAKERS, RULES),
        ({**MAKERS, "do_sample": False}, RULES._replace(temperature=0.0)),
        ({"do_sample": True, "top_k": 64}, DrawRules(temperature=1.0, top_k=64)),
        ({"top_p": 0.9}, DrawRules(top_p=0.9)),  # transformers does not sample either
        ({"temperature": 0.7}, DrawRules(temperature=0.7)),
        ({"temperature": None, "top_k": None}, DrawRules()),
    ],
)
def test_the_file_of_the_model(given, expected):
    assert rules(given) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0.2}, RULES._replace(temperature=0.2)),
        ({"temperature": 0}, RULES._replace(temperature=0.0)),
        ({"sampling": "greedy"}, DrawRules()),
        ({"sampling": "greedy", "temperature": 0.7}, DrawRules(0.7)),
    ],
)
def test_the_setting_comes_before_the_file(settings, expected):
    assert rules(MAKERS, **settings) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": 2.5},
        {"top_k": True},
        {"min_p": float("nan")},
        {"repetition_penalty": 0},
    ],
)
def test_a_wrong_value_in_the_file_is_ignored_and_said(wrong, caplog):
    with caplog.at_level(logging.WARNING):
        assert rules(wrong) == DrawRules()
    assert f"generation_config.json: {next(iter(wrong))} is" in caplog.text


def test_a_request_speaks_first_each_parameter_alone():
    assert RULES.of(Sampling()) == RULES
    assert RULES.of(Sampling(temperature=0)) == RULES._replace(temperature=0)
    assert RULES.of(Sampling(top_k=0, repetition_penalty=1.0)) == RULES._replace(
        top_k=0, repetition_penalty=1.0
    )


def test_a_complete_request_leaves_nothing_open():
    complete = RULES.complete(Sampling(max_tokens=7, seed=3, stop=("a",)))
    assert complete == Sampling(7, *RULES, seed=3, stop=("a",))
    assert set(DrawRules._fields) <= {field.name for field in fields(Sampling)}
