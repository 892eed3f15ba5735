"""The agents API: ownership, actions, export and import."""

import uuid

import httpx
import pytest

from keepwarm import config
from keepwarm.server.admin.agents import MAX_OF_ONE_KEY
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import serve

LONG = "The quick brown fox jumps over the lazy dog. " * 20
A, B = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}


def say(live, agent, text=LONG, **headers):
    """One turn of an agent; recorded when this returns."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    headers = {"X-Keepwarm-Agent": agent, "X-Keepwarm-Cache": "durable", **headers}
    answer = live.post("/v1/chat/completions", body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def listed(live, **headers):
    return [agent["id"] for agent in live.get("/v1/agents", **headers).json()["data"]]


def delete(live, agent, **headers):
    return httpx.delete(f"{live.url}/v1/agents/{agent}", headers=headers)


def upload(live, content, agent, **headers):
    return httpx.post(
        f"{live.url}/v1/agents/import", params={"id": agent}, content=content, headers=headers
    )


def test_request_makes_its_agent_and_one_made_before_keeps_its_options(live):
    live.post("/v1/agents", {"id": "early", "pinned": True})
    for name, pinned in (("alice", False), ("early", True)):
        usage = say(live, name)["usage"]
        agent = live.get(f"/v1/agents/{name}").json()
        assert name in listed(live)
        n_said = usage["prompt_tokens"] + usage["completion_tokens"]
        assert agent["turns"] == [agent["n_tokens"]]
        assert n_said - 1 <= agent["n_tokens"] <= n_said
        assert agent["n_bytes"] > 0
        assert agent["pinned"] is pinned


def test_one_agent_through_every_api(live):
    """The header names the same conversation to all of them."""
    headers = {"X-Keepwarm-Agent": "everywhere", "X-Keepwarm-Cache": "durable"}
    turns = [{"role": "user", "content": LONG}]
    live.post("/v1/chat/completions", {"messages": turns, "max_tokens": 4}, **headers)
    live.post("/v1/responses", {"input": turns, "max_output_tokens": 4}, **headers)
    body = {"model": "m", "messages": turns, "max_tokens": 4}
    answer = live.post("/v1/messages", body, **headers)
    assert answer.json()["usage"]["cache_read_input_tokens"] > 0
    assert listed(live).count("everywhere") == 1
    assert live.get("/v1/agents/everywhere").json()["used"] > 0


def test_agent_options_are_set_and_changed(live):
    """Those that are not sent stay as they are."""
    options = {"quota_bytes": 1000, "retention_s": 60, "metadata": {"team": "web"}}
    made = live.post("/v1/agents", {"id": "bob", **options}).json()
    assert made.items() >= options.items()
    assert made["model"]
    again = live.post("/v1/agents", {"id": "bob"})
    assert again.status_code == 400
    assert "already" in again.json()["error"]["message"]
    for change in (
        {"pinned": True},
        {"pinned": False},
        {"quota_bytes": None},
        {"retention_s": 90, "metadata": {"note": "of the demo"}},
    ):
        options |= change
        assert live.patch("/v1/agents/bob", change).json().items() >= options.items()
    for bad in ({"metadata": {"k": "v" * 513}}, {"retention_s": 0}, {"metadata": {"": "x"}}):
        assert live.patch("/v1/agents/bob", bad).status_code == 400
    assert live.get("/v1/agents/bob").json().items() >= options.items()


def test_a_title_request_under_the_same_name_is_a_branch(live):
    """As coding agents send it, between two turns; the pinned conversation is not overwritten."""
    said = say(live, "fred")["choices"][0]["message"]
    live.patch("/v1/agents/fred", {"pinned": True})
    before = live.get("/v1/agents/fred").json()
    say(live, "fred", "Write a title.")
    after = live.get("/v1/agents/fred").json()
    assert after.items() >= {name: before[name] for name in ("n_tokens", "turns", "pinned")}.items()
    assert [branch["number"] for branch in after["branches"]] == [1, 2]
    assert after["model"]
    turns = [{"role": "user", "content": LONG}, said, {"role": "user", "content": "And then?"}]
    headers = {"X-Keepwarm-Agent": "fred", "X-Keepwarm-Cache": "durable"}
    live.post("/v1/chat/completions", {"messages": turns, "max_tokens": 4}, **headers)
    third = live.get("/v1/agents/fred").json()
    assert (len(third["turns"]), third["branch"]) == (2, 1)
    title = third["branches"][1]
    fork = live.post("/v1/agents/fred/fork?branch=2", {"id": "title"}).json()
    assert fork["n_tokens"] == title["n_tokens"] < 100
    assert live.patch("/v1/agents/fred?branch=2", {"pinned": True}).json()["branches"][1]["pinned"]
    exported = live.get("/v1/agents/fred/export?branch=2")
    assert upload(live, exported.content, "fred-2").json()["n_tokens"] == title["n_tokens"]
    assert live.post("/v1/agents/fred/rewind?branch=2", {"turn": 1}).json()["branch"] == 2
    wrong = live.post("/v1/agents/fred/rewind?branch=9", {"turn": 1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "branch")


def test_rewinding_a_branch_keeps_the_live_caches_of_the_others(live):
    said = say(live, "gus")["choices"][0]["message"]
    say(live, "gus", "Write a title.")
    assert live.post("/v1/agents/gus/rewind?branch=2", {"turn": 0}).status_code == 200
    say(live, "gus", "Write a summary.")  # with it goes what the rewind has left
    turns = [{"role": "user", "content": LONG}, said, {"role": "user", "content": "And then?"}]
    body = {"messages": turns, "max_tokens": 4}
    answer = live.post("/v1/chat/completions", body, **{"X-Keepwarm-Agent": "gus"}).json()
    assert list(answer["keepwarm"]["reused"]) == ["live"]


def test_several_forks_in_one_call(live):
    say(live, "hugo")
    made = live.post("/v1/agents/hugo/fork", {"ids": ["hugo-1", "hugo-2"]}).json()
    assert [(each["id"], each["ephemeral"]) for each in made["data"]] == [
        ("hugo-1", False),
        ("hugo-2", False),
    ]
    body = {"ids": ["hugo-3"], "ephemeral": True}
    assert live.post("/v1/agents/hugo/fork", body).json()["data"][0]["ephemeral"]
    assert {"hugo-1", "hugo-2", "hugo-3"} <= set(listed(live))
    for bad in ({}, {"id": "x", "ids": ["y"]}, {"ids": []}, {"ids": ["z", "hugo-1"]}):
        assert live.post("/v1/agents/hugo/fork", bad).status_code == 400
    assert "z" not in listed(live)
    assert delete(live, "hugo-3").json()["removed_blocks"] == 0


def test_what_is_only_in_memory_has_a_size(live):
    """An ephemeral fork: nothing of its own turns is on disk."""
    say(live, "iris")
    before = live.post("/v1/agents/iris/fork", {"id": "brief", "ephemeral": True}).json()
    text = [{"role": "user", "content": f"{uuid.uuid4()} and more of it " * 60}]
    answer = live.post("/v1/agents/brief/chat/completions", {"messages": text, "max_tokens": 2})
    assert answer.status_code == 200
    after = live.get("/v1/agents/brief").json()
    store = live.host.engine.store
    on_disk = store.on_disk.disk.have(store.on_disk.agents.show("brief").blocks)
    assert after["n_tokens"] > before["n_tokens"] + 256
    assert after["n_bytes"] > before["n_bytes"] >= sum(one.n_bytes for one in on_disk.values())
    shown = live.get("/v1/dashboard/agents").json()["data"]
    assert {one["id"]: one["n_bytes"] for one in shown}["brief"] == after["n_bytes"]


def test_fork_and_rewind(live):
    answer = say(live, "carol")
    said = answer["choices"][0]["message"]
    turns = [{"role": "user", "content": LONG}, said, {"role": "user", "content": "And then?"}]
    headers = {"X-Keepwarm-Agent": "carol", "X-Keepwarm-Cache": "durable"}
    live.post("/v1/chat/completions", {"messages": turns, "max_tokens": 4}, **headers)
    before = live.get("/v1/agents/carol").json()
    assert len(before["turns"]) == 2
    fork = live.post("/v1/agents/carol/fork", {"id": "carla"}).json()
    assert fork["forked_from"] == "carol"
    assert fork["turns"] == before["turns"]
    back = live.post("/v1/agents/carla/rewind", {"turn": 1}).json()
    assert back["turns"] == before["turns"][:1]
    assert live.get("/v1/agents/carol").json()["turns"] == before["turns"]
    beyond = live.post("/v1/agents/carla/rewind", {"turn": 2})
    assert beyond.status_code == 400
    assert beyond.json()["error"]["param"] == "turn"


def test_a_deleted_agent_is_gone(serving):
    with serving() as live:
        say(live, "dave")
        gone = delete(live, "dave").json()
        assert gone["deleted"] is True
        assert gone["removed_blocks"] > 0
        assert delete(live, "dave").status_code == 404
        assert live.host.engine.store.on_disk.disk.stats().blocks == 0


@pytest.mark.parametrize("wrong", ["-x", "a/b", "a b", "x" * 129, "..", "%2e%2e"])
def test_what_is_no_id(live, wrong):
    assert live.post("/v1/agents", {"id": wrong}).status_code == 400
    assert live.get(f"/v1/agents/{wrong}").status_code in {400, 404}


def test_who_is_unknown(live):
    for path in ("", "/export"):
        answer = live.get(f"/v1/agents/nobody{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "agent_not_found"


def test_a_key_has_agents_of_its_own(serving):
    """Ids may collide between keys; neither key sees or changes the other's agents."""
    with serving(api_keys="a,b") as live:
        say(live, "main", **A)
        say(live, "main", "Something else altogether.", **B)
        say(live, "private", **A)
        assert listed(live, **A) == ["main", "private"]
        assert listed(live, **B) == ["main"]
        longest = "x" * 128
        assert live.post("/v1/agents", {"id": longest}, **A).json()["id"] == longest
        assert listed(live, **A) == ["main", "private", longest]
        assert delete(live, longest, **A).status_code == 200
        mine, other = (live.get("/v1/agents/main", **key).json() for key in (A, B))
        assert mine["n_tokens"] > other["n_tokens"]
        assert live.get("/v1/agents/private", **B).status_code == 404
        assert live.patch("/v1/agents/private", {"pinned": True}, **B).status_code == 404
        assert live.get("/v1/agents/private/export", **B).status_code == 404
        assert delete(live, "main", **B).status_code == 200
        assert listed(live, **A) == ["main", "private"]
        bundle = live.get("/v1/agents/main/export", **A).content
        assert upload(live, bundle, "taken", **B).status_code == 200  # only the weights must match
        answer = say(live, "taken", LONG, **B)
        assert answer["keepwarm"]["reused"]["disk"] == answer["usage"]["prompt_tokens"] - 1
        assert (listed(live, **A), listed(live, **B)) == (["main", "private"], ["taken"])


# Carrying them.


@pytest.fixture(scope="module")
def bundle(live):
    say(live, "traveller", LONG)
    answer = live.get("/v1/agents/traveller/export")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-tar"
    assert answer.content.startswith(b"manifest.json")
    return answer.content


def test_a_bundle_is_warm_where_it_arrives(serving, bundle):
    """It may be larger than a body."""
    with serving(max_body_bytes=len(bundle) // 2) as there:
        made = upload(there, bundle, "arrived")
        assert made.status_code == 200, made.text
        assert made.json()["n_tokens"] > 0
        answer = say(there, "arrived", LONG)
        assert made.json()["model"] == there.get("/v1/agents/arrived").json()["model"] != ""
        assert answer["keepwarm"]["reused"]["disk"] == answer["usage"]["prompt_tokens"] - 1


def test_another_model_refuses_it_with_the_reason(bundle, tmp_path):
    from keepwarm import config
    from keepwarm.models.load import load

    settings = config.load({"KEEPWARM_HOME": str(tmp_path / "home")})
    other = load(str(write_checkpoint(tmp_path / "other", seed=1, n_context=16384)), settings)
    with serve(other, settings) as there:
        answer = upload(there, bundle, "arrived")
        assert answer.status_code == 422
        assert "another model: weights" in answer.json()["error"]["message"]
        assert listed(there) == []


@pytest.mark.parametrize("share", [0, 0.5])
def test_a_bundle_that_is_empty_or_cut_is_refused(live, bundle, share):
    answer = upload(live, bundle[: int(share * len(bundle))], "broken")
    assert answer.status_code == 422 if share else 400, answer.text
    assert str(live.settings.home) not in answer.text
    assert "broken" not in listed(live)


def test_an_id_in_use_takes_nothing_in(live, bundle):
    assert upload(live, bundle, "traveller").status_code == 400


def test_a_bundle_larger_than_the_store_is_refused(serving, bundle):
    with serving(disk_bytes=len(bundle) // 2) as there:
        assert upload(there, bundle, "big").status_code == 413


def test_bundles_under_way_count_for_their_key_where_keys_share_a_cache(served_model, tmp_path):
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, api_keys="a,b", share_cache=True)
    apps = []
    with serve(served_model, settings, around=apps.append) as live:
        owner = apps[0].state.keys.check({"x-api-key": "a"}).owner
        apps[0].state.transfers.limit.take(owner, MAX_OF_ONE_KEY)
        found = [live.get("/v1/agents/none/export", **key).status_code for key in (A, B)]
    assert found == [429, 404]
