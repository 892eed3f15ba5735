"""A conversation that moves between machines has the tokens it would have on one."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing

import pytest

from keepwarm.remote.addresses import open_backend
from keepwarm.remote.janitor import walk as walk_place
from keepwarm.remote.records import parse_last
from keepwarm.remote.tier import RemoteTier
from keepwarm.text.request import Request, Sampling
from tests.engine.test_shared import machine
from tests.kit.places import KINDS
from tests.kit.waiting import wait_until

SOON = 60.0
ORDER = [0, 1, 2, 2, 0, 2, 1, 1, 0]  # machines in turn; each is left, stayed on and come back to


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr("keepwarm.remote.opening.START_S", SOON)
    monkeypatch.setattr("keepwarm.remote.handshake.MARK_S", SOON)
    monkeypatch.setattr("keepwarm.remote.opening.MARK_S", SOON)
    monkeypatch.setattr("keepwarm.remote.health.TRIAL_S", SOON)
    monkeypatch.setattr("keepwarm.remote.tier.ASK_S", SOON)
    monkeypatch.setattr("keepwarm.remote.tier.ANSWERS_S", SOON)
    monkeypatch.setattr("keepwarm.remote.tier.MIN_READ_S", SOON)


@pytest.fixture
def place(tmp_path):
    made = tmp_path / "shared"
    made.mkdir()
    return made


def say(engine, messages, agent=None):
    """One turn: the tokens of its prompt, and the messages after it. The answer is spelled letter
    by letter, as no text is tokenised.
    """
    bias = dict(
        zip(engine.model.tokenizer.convert_tokens_to_ids(["t", "h"]), (96, 100), strict=True)
    )
    sampling = Sampling(max_tokens=6, temperature=2, seed=len(messages), logit_bias=bias)
    answer = engine.submit(Request(messages=messages, sampling=sampling, agent=agent))
    text = answer.result().choices[0].text
    return answer.prepared.tokens, [*messages, {"role": "assistant", "content": text}]


def walk(engines, order, n_turns):
    """The tokens of every prompt."""
    messages, prompts = [], []
    for turn in range(n_turns):
        messages = [*messages, {"role": "user", "content": f"the {turn}. question"}]
        tokens, messages = say(engines[order[turn % len(order)]], messages)
        prompts.append(tokens)
    return prompts


@pytest.mark.parametrize(
    ("kind", "n_turns"),
    [
        ("s3", 7),
        *(pytest.param(kind, 50, marks=pytest.mark.soak) for kind in KINDS),
    ],
)
def test_a_walk_over_three_machines_has_the_tokens_of_one(
    models, tmp_path, place, places, kind, n_turns
):
    model = models.of("llama")
    with machine(model, tmp_path / "alone") as alone:
        expected = walk([alone], [0], n_turns)
    with ExitStack() as opened:
        names, url = [tmp_path / name for name in "abc"], opened.enter_context(places[kind](place))
        three = [opened.enter_context(machine(model, name, url)) for name in names]
        assert walk(three, ORDER, n_turns) == expected
    with ExitStack() as opened:  # else it proves nothing
        apart = [opened.enter_context(machine(model, tmp_path / name)) for name in "de"]
        assert walk(apart, [0, 1], 4) != expected[:4]


def n_told(place):
    """Blobs with answers, and those that name them."""
    with closing(open_backend(place.as_uri())) as there:
        words = [parse_last(one.name) for one in walk_place(there)]
    return sum(word.part is None for word in words)


def test_a_conversation_that_is_deleted_leaves_no_answers_there(models, tmp_path, place):
    """Those of every turn go, and another conversation's stay."""
    with machine(models.of("llama"), tmp_path / "a", place.as_uri()) as engine:
        for agent in ("coder", "other"):
            messages = []
            for turn in range(3):
                messages = [*messages, {"role": "user", "content": f"{agent}'s {turn}. question"}]
                _, messages = say(engine, messages, agent)
        engine.wait_until_saved()
        assert n_told(place) == 12, "with what names them"
        engine.forget("coder")
        assert engine.store.unreached() == []
        assert n_told(place) == 6


def test_an_answer_that_is_told_after_its_conversation_was_deleted_is_taken_back(
    models, tmp_path, place, monkeypatch
):
    tell, seen = RemoteTier.tell, []
    with machine(models.of("llama"), tmp_path / "a", place.as_uri()) as engine:

        def tell_late(*args):
            *known, is_wanted = args
            engine.forget("coder")
            seen.append(engine.store.unreached())
            return tell(*known, lambda: seen.append(n_told(place)) or is_wanted())

        _, messages = say(engine, [{"role": "user", "content": "a question"}], "coder")
        engine.wait_until_saved()
        monkeypatch.setattr(RemoteTier, "tell", tell_late)
        say(engine, [*messages, {"role": "user", "content": "another"}], "coder")
        engine.wait_until_saved()
        assert engine.store.unreached() == []
        assert (seen, n_told(place)) == ([[], 2], 0)


def test_the_end_waits_until_every_choice_is_told(models, tmp_path, place, monkeypatch):
    tell, gate, calls = RemoteTier.tell, threading.Event(), []

    def tell_the_first_late(*args):
        calls.append(args)
        return (calls[0] is not args or gate.wait(SOON)) and tell(*args)

    monkeypatch.setattr(RemoteTier, "tell", tell_the_first_late)
    sampling = Sampling(max_tokens=6, temperature=2, seed=1)
    request = Request(messages=[{"role": "user", "content": "a"}], sampling=sampling, n=3)
    with (
        machine(models.of("llama"), tmp_path / "a", place.as_uri()) as engine,
        ThreadPoolExecutor() as threads,
    ):
        result = threads.submit(engine.submit(request).result)
        wait_until(lambda: n_told(place) == 4)
        wait([result], timeout=0.2)
        assert not result.done()
        gate.set()
        assert len(result.result(SOON).choices) == 3
        assert n_told(place) == 6


@pytest.mark.parametrize(("agent", "n_choices"), [("coder", 1), (None, 3)])
def test_of_several_answers_to_an_agent_only_the_first_is_told(
    agent, n_choices, models, tmp_path, place
):
    """Nothing names the ends of the others, so nothing could delete them."""
    with machine(models.of("llama"), tmp_path / "a", place.as_uri()) as engine:
        sampling = Sampling(max_tokens=6, temperature=2, seed=1)
        messages = [{"role": "user", "content": "a question"}]
        request = Request(messages=messages, sampling=sampling, agent=agent, n=3)
        result = engine.submit(request).result()
        assert len({choice.text for choice in result.choices}) == 3
        engine.wait_until_saved()
        assert n_told(place) == 2 * n_choices
