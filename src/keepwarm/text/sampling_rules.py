"""The sampling parameters of a request: what holds where it is silent, and which are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from keepwarm.config import Settings
from keepwarm.errors import BadInput
from keepwarm.text.request import Sampling

LOG = logging.getLogger(__name__)
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_BIAS = 100
LARGEST = 1e30  # of any parameter: a million of them still add up in fp32


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -LARGEST <= value <= LARGEST


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# The check of each parameter, and its wording in the error.
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: _is_number(v) and v >= 0, "a number from 0 up"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0 and at most 1"),
    "top_k": (lambda v: _is_whole(v) and v >= 0, "a whole number from 0 (all tokens) up"),
    "min_p": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda v: _is_number(v) and v >= 1 / LARGEST, "a number above 0"),
    "presence_penalty": (_is_number, "a finite number"),
    "frequency_penalty": (_is_number, "a finite number"),
    "max_tokens": (lambda v: v is None or (_is_whole(v) and v >= 0), "a whole number from 0 up"),
    "seed": (
        lambda v: v is None or (_is_whole(v) and -(2**63) <= v < 2**64),
        "a whole number from -2^63 to 2^64 - 1",
    ),
    "top_logprobs": (
        lambda v: v is None or (_is_whole(v) and 0 <= v <= MAX_TOP_LOGPROBS),
        f"a whole number from 0 to {MAX_TOP_LOGPROBS}",
    ),
}


class DrawRules(NamedTuple):
    """How tokens are drawn. The defaults are greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def of(self, sampling: Sampling) -> DrawRules:
        """What holds for a request: its own values, and these where it has none."""
        given = {name: getattr(sampling, name) for name in self._fields}
        return self._replace(**{name: each for name, each in given.items() if each is not None})

    def complete(self, sampling: Sampling) -> Sampling:
        """The request's parameters, with nothing left open."""
        return replace(sampling, **self.of(sampling)._asdict())


def default_rules(generation_config: Mapping[str, Any], settings: Settings) -> DrawRules:
    """What holds where a request is silent: the setting, else the model's file, else greedy."""
    use_file = settings.sampling == "model"
    rules = _rules_of_file(generation_config) if use_file else DrawRules()
    if settings.temperature is None:
        return rules
    return rules._replace(temperature=settings.temperature)


def _rules_of_file(given: Mapping[str, Any]) -> DrawRules:
    """As transformers reads it: without a temperature a model that samples has 1."""
    found = {name: given[name] for name in DrawRules._fields if given.get(name) is not None}
    for name in [name for name, value in found.items() if not RULES[name][0](value)]:
        must, value = RULES[name][1], found.pop(name)
        LOG.warning("generation_config.json: %s is %.40r, not %s; ignored", name, value, must)
    if given.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    elif given.get("do_sample") is False:
        found["temperature"] = 0.0
    return DrawRules(**found)


def check_sampling(sampling: Sampling, n_vocab: int) -> None:
    """Raise BadInput for the first parameter that is out of range."""
    for name, (holds, must) in RULES.items():
        value = getattr(sampling, name)
        if value is None and name in DrawRules._fields:
            continue
        if not holds(value):
            raise BadInput(f"{name} is {value!r}; it must be {must}.")
    _check_bias(sampling.logit_bias, n_vocab)
    if len(sampling.stop) > MAX_STOPS:
        raise BadInput(f"There are {len(sampling.stop)} stop strings; send at most {MAX_STOPS}.")
    if not all(isinstance(stop, str) and stop for stop in sampling.stop):
        raise BadInput("A stop string is empty or not a string; leave it out.")


def _check_bias(bias: Mapping[int, float], n_vocab: int) -> None:
    for token, value in bias.items():
        if not (_is_whole(token) and 0 <= token < n_vocab):
            raise BadInput(
                f"logit_bias has the token {token!r}; this model has {n_vocab} tokens, from 0 on."
            )
        if not (_is_number(value) and abs(value) <= MAX_BIAS):
            raise BadInput(
                f"logit_bias of token {token} is {value!r}; it must be from -100 to 100."
            )
