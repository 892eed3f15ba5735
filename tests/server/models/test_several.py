"""Two models on one server: both stay loaded and warm, each answers as it would alone."""

import json
import shutil
import threading

import pytest

from keepwarm import config
from keepwarm.cache.store import Budgets, Store
from keepwarm.errors import BadInput, EngineFailed
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models, NamedModel, configured
from keepwarm.server.openai import routes as openai_routes
from tests.kit.engines import held
from tests.kit.waiting import wait_until
from tests.server.test_mcp import calls

CHAT = "/v1/chat/completions"
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def both(several, big, small):
    with several(f"big={big}", f"small={small}", f"haiku={small}", admin_key="admin") as live:
        yield live


def asked(model, content="What is the answer to the question of the user?", **more):
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0, **more}


def chat(live, model, *content, **more):
    answer = live.post(CHAT, asked(model, *content, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def loads(live):
    return {slot.host.name: slot.n_loads for slot in live.models.slots.all}


def test_requests_in_turns_reload_nothing_and_are_warm(both):
    before = loads(both)
    first = {name: chat(both, name) for name in ("big", "small")}
    again = {name: chat(both, name) for name in ("big", "small", "big", "small")}
    for name, answer in again.items():
        assert answer["model"] == name
        assert answer["keepwarm"]["recomputed"] == 1
        assert answer["choices"] == first[name]["choices"]
    assert first["small"]["keepwarm"]["reused"] == {}  # blocks of the other are not its own
    texts = [answer["choices"][0]["message"]["content"] for answer in first.values()]
    assert texts[0] != texts[1]
    assert loads(both) == before == {"big": 1, "small": 1}


def test_a_second_name_has_the_same_engine_and_blocks(both):
    chat(both, "small", "the same conversation under two names")
    answer = chat(both, "haiku", "the same conversation under two names")
    assert answer["keepwarm"]["recomputed"] == 1
    assert len(both.models.engines) == 2


def test_second_names_come_back_with_their_model(several, big, small, tmp_path):
    """After another one had its place, and after one that could not be loaded."""
    shutil.copytree(small, tmp_path / "spoilt")
    (tmp_path / "spoilt" / "model.safetensors").write_bytes(b"no weights at all")
    with several(f"big={big}", f"large={big}", admin_key="admin", on_demand="/*") as live:
        for model, status in ((small, 200), ("large", 200), (tmp_path / "spoilt", 422)):
            body = {"model": str(model)}
            assert live.post("/v1/admin/load", body, **ADMIN).status_code == status
            names = [str(small)] if model is small else ["big", "large"]
            assert [each["id"] for each in live.get("/v1/models").json()["data"]] == names


def test_it_answers_as_it_would_alone(both, several, small):
    """Also while the other model answers."""
    with several(f"small={small}") as alone:
        wanted = chat(alone, "small", max_tokens=20)["choices"]
    endless = asked("big", max_tokens=3000, logit_bias={"2": -100}, stream=True)
    thread = threading.Thread(target=lambda: both.post(CHAT, endless))
    thread.start()
    wait_until(lambda: both.host.engine.stats().decoding)
    assert chat(both, "small", max_tokens=20)["choices"] == wanted
    both.host.engine.call(both.host.engine._abort_all).result()
    thread.join(300)


def test_every_api_takes_the_name(both):
    question = [{"role": "user", "content": "What is the answer?"}]
    bodies = {
        "/v1/completions": {"prompt": "the fox", "max_tokens": 2},
        "/v1/embeddings": {"input": "the fox"},
        "/v1/messages": {"messages": question, "max_tokens": 2},
        "/v1/responses": {"input": "the fox", "max_output_tokens": 16},
    }
    for path, body in bodies.items():
        before = both.models.slots.all[1].host.engine.stats().counters["finished"]
        answer = both.post(path, {**body, "model": "small"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "small"
        assert both.models.slots.all[1].host.engine.stats().counters["finished"] == before + 1
    chat(both, "small", "is it warm?")
    warm = {
        n: both.post("/v1/cache/lookup", asked(n, "is it warm?")).json() for n in ("big", "small")
    }
    assert sum(warm["small"]["warm"].values()) == warm["small"]["prompt_tokens"] - 1
    assert sum(warm["big"]["warm"].values()) < warm["big"]["prompt_tokens"] // 2


@pytest.mark.parametrize("on_demand", ["", "*"])
def test_an_agent_is_compacted_by_its_own_model(several, big, small, tmp_path, on_demand):
    """By the tool too, which is told no model; and where that has another name now, also if models
    of any name may be loaded.
    """
    values = {"mcp": "all", "store": tmp_path / "store"}
    with several(f"small={small}", f"big={big}", **values) as live:
        chat(live, "big", keepwarm={"agent": "fox"})
        (made,) = calls(live, {}, ("compact_agent", {"agent": "fox"}))
        assert made["n_before"] > 0, made
    with several(f"renamed={big}", strict_model=True, on_demand=on_demand, **values) as live:
        agents = live.get("/v1/dashboard/agents").json()["data"]
        assert [(agent["model"], agent["is_served"]) for agent in agents] == [("big", False)]
        (made,) = calls(live, {}, ("compact_agent", {"agent": "fox"}))
        assert made["n_before"] > 0, made


def test_a_response_in_the_background_keeps_its_model(both):
    slot = both.models.known("small")
    chat(both, "small")
    body = {"model": "small", "input": "the fox", "max_output_tokens": 16, "background": True}
    with held(slot.host.engine):
        assert both.post("/v1/responses", body).json()["status"] == "queued"
        assert slot.n_leases == 1
    wait_until(lambda: not slot.n_leases)


def test_an_unknown_name_is_the_first_or_refused(both, several, big, small):
    assert chat(both, "claude-opus")["model"] == "big"
    with several(f"big={big}", f"small={small}", strict_model=True) as strict:
        refused = strict.post(CHAT, asked("claude-opus"))
        assert refused.status_code == 404
        assert "this server has 'big', 'small'" in refused.json()["error"]["message"]
        refused = strict.post(CHAT, asked(str(small)))
        assert refused.status_code == 404  # a path is no name
        assert strict.post("/api/show", {"model": "claude-opus"}).status_code == 404
        assert chat(strict, "small")["model"] == "small"


def test_vectors_of_an_unknown_name_are_the_only_embedders_or_refused(
    both, several, big, small, tmp_path
):
    """Vectors of another model would spoil an index, silently."""
    bodies = {
        "/v1/embeddings": {"input": "the fox"},
        "/api/embed": {"input": "the fox"},
        "/api/embeddings": {"prompt": "the fox"},
    }
    made = shutil.copytree(small, tmp_path / "embedder")
    (made / "config_sentence_transformers.json").write_text("{}")
    with several(f"big={big}", f"vectors={made}") as one:
        for path, body in bodies.items():
            asks = {**body, "model": "nomic-embed-text"}
            refused = both.post(path, asks)
            assert refused.status_code == 404
            assert "this server has 'big', 'small'" in refused.text
            assert both.post(path, {**asks, "model": "small"}).status_code == 200
            found = one.post(path, asks)
            assert found.status_code == 200, found.text
            assert json.loads(found.headers["x-keepwarm-receipt"])["model"] == "vectors"


def test_the_only_embedder_is_that_of_all_models_loaded_or_not(big, small, tmp_path):
    """Vectors of the one that happens to be loaded would be of another model tomorrow."""
    made = [shutil.copytree(small, tmp_path / name) for name in ("one", "two")]
    for path in made:
        (path / "config_sentence_transformers.json").write_text("{}")
    one, two = (f"{path.name}={path}" for path in made)

    def found(*names):
        given = {"model": names[0], "more_models": ",".join(names[1:])}
        settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, **given)
        with Store(settings=settings) as store:
            models = Models.of(settings, store)
            models.close()
            only = models._only_embedder()
            return only and only.host.name

    assert found(f"big={big}", one) == "one"
    assert found(one, two) is None


def test_a_store_without_a_disk_has_nothing_to_limit(tmp_path):
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, api_keys="a,b")
    with Store(budgets=Budgets(disk=False), settings=settings) as store:
        Models(EngineHost(None, "m"), settings, store).close()


class Closed:
    """An engine that notes its end."""

    is_drained = is_closed = False

    def drain(self, timeout_s):
        self.is_drained = True

    def close(self):
        self.is_closed = True


class EndsEarly(EngineHost):
    """Is closed by another thread when it is given its engine."""

    @property
    def created(self):
        return 0

    @created.setter
    def created(self, _):
        if self._loading:
            EngineHost.close(self)


def test_an_engine_that_comes_while_its_server_stops_is_closed():
    engine = Closed()
    EndsEarly(None, "m").load(lambda _: engine, in_full=False)
    assert engine.is_closed


class Drained(EngineHost):
    """Its server begins to stop just before it is given its engine."""

    def start_warmer(self):
        pass

    @property
    def created(self):
        return 0

    @created.setter
    def created(self, _):
        if self._loading:
            self.drain(0)


def test_an_engine_that_comes_while_its_server_drains_takes_no_request():
    engine = Closed()
    Drained(None, "m").load(lambda _: engine, in_full=False)
    assert engine.is_drained
    assert not engine.is_closed


def test_an_answer_whose_request_fails_before_its_response_is_cancelled(serving, monkeypatch):
    def fail(*_):
        raise EngineFailed("No response.")

    monkeypatch.setattr(openai_routes, "WholeAnswer", fail)
    with serving() as live:
        endless = asked("tiny", max_tokens=9000, logit_bias={"2": -100})
        assert live.post(CHAT, endless).status_code == 500
        wait_until(lambda: not live.host.engine.running())
        assert live.host.engine.stats().counters["cancelled"] == 1


def test_all_that_can_be_had_is_listed(both):
    listed = both.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["big", "small", "haiku"]
    assert all(model["loaded"] for model in listed)
    assert [model["context_length"] for model in listed] == [16384, 512, 512]
    assert both.get("/v1/models/haiku").json()["id"] == "haiku"
    assert both.get("/v1/models/nothing").status_code == 404


def test_anthropics_client_lists_all_whatever_page_it_asks_for(both):
    import anthropic

    with anthropic.Anthropic(base_url=both.url, api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list(limit=1)] == ["big", "small", "haiku"]
        with pytest.raises(anthropic.NotFoundError) as error:
            client.models.retrieve("nothing")
        assert error.value.body["error"]["type"] == "not_found_error"


def test_operators_see_both(both):
    for name in ("big", "small"):
        chat(both, name, f"what operators see of {name}", keepwarm={"agent": f"of-{name}"})
    metrics = both.get("/metrics").text
    assert 'keepwarm_model_loaded{model="small"} 1.0' in metrics
    finished = both.models.ledger.counters()["finished"]
    assert f'keepwarm_answers_total{{outcome="finished"}} {float(finished)}' in metrics
    ended = both.get("/v1/dashboard/requests").json()["data"]
    assert {"of-big", "of-small"} <= {entry["agent"] for entry in ended}
    numbers = [entry["number"] for entry in ended]
    assert len(numbers) == len(set(numbers))

    def seen():
        agents = both.get("/v1/agents").json()["data"]
        return {agent["model"] for agent in agents if agent["id"].startswith("of-")}

    wait_until(lambda: seen() == {"big", "small"})  # recorded after their answers
    assert both.get("/health/ready").status_code == 200
    assert both.post("/v1/cache/clear", {}).status_code == 200
    assert all(engine.live.stats.n_bytes == 0 for engine in both.models.engines)


def test_an_unloaded_one_says_so_and_the_other_answers(both):
    chat(both, "haiku")
    assert both.post("/v1/admin/unload", {"model": "small"}, **ADMIN).json()["previous"] == "small"
    refused = both.post(CHAT, asked("haiku"))
    assert refused.status_code == 503
    assert chat(both, "big")["model"] == "big"
    assert [model["loaded"] for model in both.get("/v1/models").json()["data"]] == [
        True,
        False,
        False,
    ]
    assert both.post("/v1/admin/load", {"model": "small"}, **ADMIN).json()["model"] == "small"
    assert chat(both, "haiku")["keepwarm"]["recomputed"] <= 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("smollm2", ("smollm2", "smollm2")),
        ("small=org/name", ("small", "org/name")),
        ("small = /models/a=b", ("small", "/models/a=b")),
        ("/models/a=b", ("/models/a=b", "/models/a=b")),
        ("=x", ("=x", "=x")),
    ],
)
def test_a_model_may_have_a_name(text, found):
    assert NamedModel.parse(text) == found


def test_names_are_checked_at_the_start(tmp_path):
    def given(**values):
        return config.load({"KEEPWARM_HOME": str(tmp_path)}, **values)

    with pytest.raises(BadInput, match="Two models are called 'a'"):
        configured(given(model="a=x", more_models="a=y"))
    with pytest.raises(BadInput, match="pinned_models names 'b', and the server has 'a'"):
        configured(given(model="a=x", pinned_models="b"))
    assert len(configured(given(model="a=x", more_models="a=x, b"))) == 2


def test_dashboard_has_the_lines_of_each_model_and_refuses_others(both):
    for model, n_context in (("big", 16384), ("small", 512)):
        told = both.get(f"/v1/dashboard/connect?model={model}").json()
        assert told["models"] == ["big", "small", "haiku"]
        (claude,) = [each for each in told["clients"] if each["client"] == "claude"]
        lines = "\n".join(claude["lines"])
        assert f"ANTHROPIC_MODEL={model}" in lines
        assert f"CLAUDE_CODE_AUTO_COMPACT_WINDOW={n_context}" in lines
    answer = both.get("/v1/dashboard/connect?model=other")
    assert answer.status_code == 404
    assert "this server has 'big', 'small', 'haiku'" in answer.json()["error"]["message"]
