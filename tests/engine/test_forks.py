"""Forks share their parent's blocks: ten of them cost one prefill, ephemeral ones no bytes."""

from __future__ import annotations

import pytest

import keepwarm
from keepwarm.errors import BadInput
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Sampling
from tests.kit.engines import ask, engine_on, tokens_of
from tests.kit.runs import prompt_of
from tests.store.kit import files_under

N_CHILDREN = 10
SHORT, LONG = Sampling(max_tokens=20, temperature=0), Sampling(max_tokens=300, temperature=0)


@pytest.fixture
def engine(request, models, tmp_path):
    with engine_on(models.of(getattr(request, "param", "llama")), tmp_path) as engine:
        yield engine


def stored_bytes(engine):
    root = engine.store.settings.store
    return {p: p.stat().st_size for d in ("blocks", "agents") for p in files_under(root / d)}


@pytest.mark.parametrize("engine", ["llama", "mamba2"], indirect=True)
def test_ten_children_of_a_running_agent_cost_one_prefill(engine):
    """The parent is answering its next turn while they are made and asked."""
    first = engine.submit(ask(prompt_of(600), 3, agent="parent")).result()
    engine.wait_until_saved()
    agents = engine.store.on_disk.agents
    said = engine.store.on_disk.tokens_of(agents.show("parent"))
    assert said == [*prompt_of(600), *tokens_of(first.choices[0])]
    running = engine.submit(ask([*said, *prompt_of(30, seed=9)], 30, agent="parent"))
    before, n_files = engine.stats().counters["prefilled_tokens"], None
    names = [f"child-{n}" for n in range(N_CHILDREN)]
    agents.fork_all("parent", names, ephemeral=True)
    own = {name: prompt_of(20, seed=20 + n) for n, name in enumerate(names)}
    answers = [engine.submit(ask([*said, *own[name]], 2, agent=name)) for name in names]
    for answer in [running, *answers]:
        answer.result()
    engine.wait_until_saved()
    n_files = stored_bytes(engine)
    n_own = 30 + 20 * N_CHILDREN
    spent = engine.stats().counters["prefilled_tokens"] - before
    assert spent <= n_own + 2 * (N_CHILDREN + 1), "the parent's tokens are not computed again"
    assert {agents.show(name).n_tokens for name in names} == {len(said) + 22}
    again = engine.submit(ask([*said, *own["child-3"], 5], 2, agent="child-3"))
    again.result()
    engine.wait_until_saved()
    assert stored_bytes(engine) == n_files, "nothing of a child is on disk"


def test_an_ephemeral_agent_cannot_be_durable(engine):
    engine.submit(ask(prompt_of(300), 3, agent="parent")).result()
    engine.wait_until_saved()
    engine.store.on_disk.agents.fork_all("parent", ["child"], ephemeral=True)
    with pytest.raises(BadInput, match="'child' is ephemeral"):
        engine.submit(ask(prompt_of(300), 3, agent="child", policy=Policy.DURABLE))


def test_forks_of_a_session(engine):
    """By number they have no name; with ids they are agents, unless they are ephemeral."""
    parent = keepwarm.Session(engine, id="ada", sampling=SHORT)
    parent.respond("What is a fox?")
    engine.wait_until_saved()
    n_files = stored_bytes(engine)
    forks = [*parent.forks(3, ephemeral=True), *parent.forks(["x", "y"], ephemeral=True)]
    for fork in forks:
        fork.respond("And a dog?")
    engine.wait_until_saved()
    assert stored_bytes(engine) == n_files
    parent.forks(["bob"])[0].respond("And a cat?")
    parent.fork().respond("And a cow?")
    engine.wait_until_saved()
    assert [agent.id for agent in engine.store.on_disk.agents.all()] == ["ada", "bob"]


def test_a_session_without_an_id_leaves_no_agent(engine):
    with keepwarm.Session(engine, sampling=LONG) as session:
        session.respond("What is a fox?")
        engine.wait_until_saved()
        assert engine.live.stats.entries == 1
    engine.wait_until_saved()
    assert list(engine.store.on_disk.agents.all()) == []
    assert engine.live.stats.entries == 0
    assert engine.store.tier_stats()["disk"].blocks > 0
