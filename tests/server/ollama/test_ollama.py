"""Ollama's API over HTTP, asked by its published client and by hand."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import httpx
import ollama
import pytest

from keepwarm import config
from keepwarm.errors import Busy, Unreachable
from keepwarm.server.ollama.models import Pulls, progress
from tests.kit.waiting import wait_until
from tests.server.conftest import serve

ASK = {"role": "user", "content": "How many leaves has the oak?"}
SHORT = {"num_predict": 8, "temperature": 0}
ENDLESS = {"model": "tiny", "messages": [ASK], "max_tokens": 12000, "logit_bias": {"2": -100}}
A, B, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("a", "b", "admin"))


@pytest.fixture(scope="module")
def client(live):
    with ollama.Client(host=live.url, verify=False) as client:
        yield client


@pytest.fixture(scope="module")
def keyed(serving):
    with serving(api_keys="a,b", admin_key="admin") as server:
        yield server


@pytest.fixture(scope="module")
def alone(serving):
    """A server whose model comes and goes."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def fetched():
    return []


@pytest.fixture(scope="module")
def small(served_model, fetched, tmp_path_factory):
    """A server whose model has a short context, and whose downloads are noted only."""
    home = str(tmp_path_factory.mktemp("home"))
    settings = config.load({"KEEPWARM_HOME": home}, on_demand="org/*,/*,*oak")

    def replace_hub(app):
        app.state.pulls = Pulls(lambda name, announce: fetched.append(name))

    with serve(replace(served_model, n_context=400), settings, around=replace_hub) as server:
        yield server


def is_leaving(live):
    """Or gone: the server looks every ten seconds."""
    return live.models.default.expires or live.host.loaded is None


@contextmanager
def talking(live, body, path="/v1/chat/completions", **headers):
    """While its answer is generated; its lines."""
    url, body = live.url + path, {"stream": True, **body}
    options = {"headers": headers, "timeout": 300, "verify": False}
    with httpx.stream("POST", url, json=body, **options) as stream:
        lines = (each for each in stream.iter_lines() if each and each[0] != ":")
        next(lines)
        yield lines


def chat(live, body=None, **headers):
    given = {"model": "tiny", "messages": [ASK], "options": SHORT, "stream": False}
    return live.post("/api/chat", given | (body or {}), **headers)


# The published client.


def test_generate_answers_a_prompt_as_a_message_or_raw(client):
    asked = {"model": "tiny", "prompt": "Once", "options": SHORT}
    whole = client.generate(**asked, logprobs=True, top_logprobs=2)
    *parts, last = client.generate(**asked, stream=True)
    assert "".join(part.response for part in parts) == whole.response
    assert last.done
    assert {len(each.top_logprobs) for each in whole.logprobs} == {2}
    raw = client.generate(**asked, raw=True)
    assert raw.prompt_eval_count < whole.prompt_eval_count


def test_models_are_listed_and_shown_as_ollama_does(client, live):
    (model,) = client.list().models
    assert model.model == "tiny:latest"
    assert model.size > 0
    assert len(model.digest) == 64
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.digest) == (model.model, model.digest)
    assert loaded.context_length == 16384
    for name in ("tiny", "tiny:latest"):
        shown = client.show(name)
        assert shown.modelinfo["general.architecture"] == "llama"
        assert shown.modelinfo["llama.context_length"] == 16384
        assert shown.capabilities == ["completion", "tools"]
        assert "im_start" in shown.template
    asked = {"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 1}}
    assert client.chat("oak", **asked).model == "tiny"
    assert client.show("oak").model_dump() == client.show("tiny").model_dump()
    assert live.post("/api/show", {"name": "tiny"}).status_code == 200
    assert live.get("/api/version").json()["version"].count(".") == 2


def test_vectors_are_those_of_openais_api(live, client):
    texts = ["a fox", "a dog"]
    ours = live.post("/v1/embeddings", {"input": texts}).json()["data"]
    found = client.embed(model="tiny", input=texts)
    for vector, other in zip(found.embeddings, ours, strict=True):
        assert vector == pytest.approx(other["embedding"], abs=1e-5)
    (short,) = client.embed(model="tiny", input="a fox", dimensions=8).embeddings
    assert len(short) == 8
    assert client.embeddings(model="tiny", prompt="a fox").embedding == found.embeddings[0]
    assert found.prompt_eval_count > 0
    with pytest.raises(ollama.ResponseError, match="dimensions"):
        client.embed(model="tiny", input="a fox", dimensions=9999)


def test_long_text_is_shortened_for_its_vector(small):
    body = {"model": "tiny", "input": ["leaves " * 900]}
    found = small.post("/api/embed", body).json()
    assert found["prompt_eval_count"] < 400
    refused = small.post("/api/embed", body | {"truncate": False})
    assert refused.status_code == 400
    assert "exceeds the context length" in refused.json()["error"]


# By hand.


def test_body_is_json_whatever_its_type_says(live):
    answer = chat(live, **{"Content-Type": "application/x-www-form-urlencoded"})
    assert answer.status_code == 200
    wrong = live.post("/api/chat", b"model=tiny", **{"Content-Type": "text/plain"})
    assert (wrong.status_code, list(wrong.json())) == (400, ["error"])


def test_root_says_that_a_server_is_there(live):
    """To Ollama's clients; browsers see the dashboard."""
    assert (live.get("/").status_code, live.get("/").text) == (200, "Ollama is running")
    assert httpx.head(live.url, verify=False).status_code == 200
    assert httpx.head(f"{live.url}/api/tags", verify=False).status_code == 200
    assert live.get("/", Accept="text/html").headers["location"] == "/dashboard"


def test_long_conversations_lose_their_oldest_turns(small):
    """As with Ollama; but the receipt says so."""
    turn = [{**ASK, "content": "leaves " * 20}, {"role": "assistant", "content": "Many."}]
    body = {"messages": [*turn, *turn, *turn, *turn, ASK]}
    dropped = chat(small, body).json()["keepwarm"]["dropped_messages"]
    assert 0 < dropped < 8
    assert dropped % 2 == 0  # whole turns
    refused = chat(small, body | {"truncate": False})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("the input length exceeds the context length")


# Loading and unloading.


def test_a_model_is_unloaded_and_loaded(alone):
    with ollama.Client(host=alone.url, verify=False) as client:
        assert client.generate(model="tiny", keep_alive=0).done_reason == "unload"
        assert alone.host.loaded is None
        assert client.ps().models == []
        assert client.show("tiny").capabilities == ["completion", "tools"]
        assert client.generate(model="tiny").done_reason == "load"
    assert alone.host.loaded is not None
    assert chat(alone).status_code == 200


def test_a_model_is_not_unloaded_while_others_use_it(alone):
    with talking(alone, ENDLESS | {"max_tokens": 500}) as lines:
        assert chat(alone, {"messages": [], "keep_alive": 0}).json()["done_reason"] == "unload"
        assert alone.host.loaded is not None
        *_, last, _ = lines
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: not alone.models.default.n_leases)
    alone.models.slots.unload_unused()  # as the server does every ten seconds
    assert alone.host.loaded is None


def test_model_stays_as_long_as_the_last_request_says(alone):
    slot = alone.models.default
    chat(alone, {"keep_alive": 0})
    assert is_leaving(alone)
    chat(alone)
    assert not slot.expires
    chat(alone, {"keep_alive": "1h"})
    assert slot.keep_until > 0
    chat(alone, {"keep_alive": 0})
    wait_until(lambda: not slot.n_leases)
    alone.models.slots.unload_unused()
    assert alone.host.loaded is None


def test_a_kept_model_outlasts_the_ttl(serving):
    with serving(model_ttl_s=1000.0) as live:
        slots, slot = live.models.slots, live.models.default
        chat(live, {"keep_alive": "2h"})
        assert slots.kept_until(slot) - slot.used == pytest.approx(7200, abs=300)
        assert live.get("/api/ps").json()["models"][0]["expires_at"] < "9999"
        for for_good in (1e12, -1):
            chat(live, {"keep_alive": for_good})
            assert live.get("/api/ps").json()["models"][0]["expires_at"] == "9999-12-31T23:59:59Z"


def test_a_pinned_model_stays(alone):
    slot = alone.models.default
    slot.pinned = True
    try:
        answer = chat(alone, {"messages": [], "keep_alive": 0})
        assert answer.status_code == 400
        assert "pinned" in answer.json()["error"]
    finally:
        slot.pinned = False


# Keys.


def test_unloading_for_others_needs_the_admin_key(keyed):
    for body in ({"keep_alive": 0}, {"keep_alive": "0s", "messages": []}):
        answer = chat(keyed, body, **A)
        assert answer.status_code == 403
        assert "admin key" in answer.json()["error"]
    assert chat(keyed, {"keep_alive": "5m"}, **A).status_code == 200
    assert chat(keyed, {"keep_alive": 0}, **ADMIN).status_code == 200
    assert is_leaving(keyed)
    assert chat(keyed, **A).status_code == 200


def test_downloads_need_the_admin_key(keyed):
    without = keyed.post("/api/pull", {"model": "org/oak"}, **A)
    assert without.status_code == 403
    assert "admin key" in without.json()["error"]
    refused = keyed.post("/api/pull", {"model": "org/oak"}, **ADMIN)
    assert "on_demand" in refused.json()["error"]


# Downloads.


def test_download_is_of_what_requests_may_name(small, fetched):
    """Only of what requests may name; nothing else is asked for, no path is looked at."""
    answer = small.post("/api/pull", {"model": "org/oak:latest"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert json.loads(answer.text.splitlines()[-1]) == {"status": "success"}
    one = small.post("/api/pull", {"name": "org/oak", "stream": False})
    assert one.json() == {"status": "success"}
    assert fetched == ["org/oak"] * 2
    for name in ("/etc", "../oak", "oak", "other/elm", ""):
        assert small.post("/api/pull", {"model": name}).status_code in (400, 403), name
    assert fetched == ["org/oak"] * 2


def test_second_download_waits_for_the_first_or_is_refused():
    gate = threading.Event()

    def fetch(name, announce):
        announce(100)
        assert gate.wait(300)
        raise Unreachable(f"The hub does not answer for {name}; retry.")

    async def said(pulling):
        return [json.loads(each) async for each in progress(pulls, pulling)]

    pulls = Pulls(fetch)
    assert pulls.so_far() is None
    first = pulls.start("org/oak")
    wait_until(lambda: pulls.so_far()["total"] == 100)
    assert pulls.so_far() == {"status": "pulling org/oak", "total": 100, "completed": 0}
    assert pulls.start("org/oak") is first
    with pytest.raises(Busy, match="org/oak is being downloaded"):
        pulls.start("org/elm")
    gate.set()
    *_, last = asyncio.run(said(first))
    assert last == {"error": "The hub does not answer for org/oak; retry."}
    with pytest.raises(Unreachable):
        pulls.start("org/elm").result(300)


def test_openai_paths_without_v1_are_the_same_routes(live):
    body = {"model": "tiny", "messages": [ASK], "max_tokens": 4, "temperature": 0}
    answers = [live.post(f"{v}/chat/completions", body).json() for v in ("/v1", "")]
    assert answers[0]["choices"] == answers[1]["choices"]
    response = live.post("/responses", {"input": "Once", "max_output_tokens": 4}).json()
    assert live.get(f"/responses/{response['id']}").json()["id"] == response["id"]
    assert live.get("/models").json() == live.get("/v1/models").json()
    wrong = live.post("/chat/completions", {"messages": []})
    assert wrong.json()["error"]["param"] == "messages"


def test_paths_have_no_second_name(live):
    """Nor may a path lead around the checks of another."""
    second = ("/modelsx", "/admin/unload", "/agents", "/cache/clear", "/v1/v1/models")
    for path in second:
        assert live.post(path, {}).status_code == 404, path
