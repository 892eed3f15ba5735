"""Models that are loaded when a request names them, within one budget of memory."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest

from keepwarm.agents import agent_store
from keepwarm.server.models import models as models_module
from keepwarm.server.models import slots as slots_module
from keepwarm.text.sandbox.process import is_ready
from tests.kit.checkpoints import write_checkpoint
from tests.kit.engines import held
from tests.kit.waiting import wait_until
from tests.server.models.test_several import ADMIN, CHAT, asked, chat, loads


def loaded(live):
    return [slot.host.name for slot in live.models.slots.all if slot.host.loaded is not None]


@pytest.fixture(scope="module")
def n_bytes(big):
    """Of the weights of each of these models, and a header."""
    return (big / "model.safetensors").stat().st_size


@contextmanager
def in_use(live, model):
    """Inside, a request to this model is in progress."""
    slot = live.models.known(model)
    chat(live, model)  # what the first request makes on the engine's thread is there
    thread = threading.Thread(target=lambda: live.post(CHAT, asked(model)))
    with held(slot.host.engine):
        thread.start()
        wait_until(lambda: slot.n_leases == 1)
        yield
    thread.join(300)
    wait_until(lambda: not slot.n_leases)


@pytest.mark.usefixtures("early_processes")
def test_the_least_recently_used_goes_and_comes_back_warm(several, big, small, third, n_bytes):
    names = (f"big={big}", f"small={small}", f"third={third}")
    with several(*names, weights_bytes=2 * n_bytes) as live:
        assert loaded(live) == ["big", "small"]  # the third does not fit beside them
        sandbox = live.models.known("big").host.engine.preparer._sandbox
        assert is_ready(sandbox._process._control, 0.0)  # a long prompt need not wait
        listed = live.get("/v1/models").json()["data"]
        assert [model["loaded"] for model in listed] == [True, True, False]
        for name in ("small", "big", "third"):
            chat(live, name)
        assert loaded(live) == ["big", "third"]
        finished = 'keepwarm_answers_total{outcome="finished"} 3.0'
        assert finished in live.get("/metrics").text  # also of the one that went
        again = chat(live, "small")
        assert again["keepwarm"]["recomputed"] == 1
        assert loaded(live) == ["small", "third"]
        assert loads(live) == {"big": 1, "small": 2, "third": 1}
        assert live.get("/health/ready").status_code == 200
        assert chat(live, "any other name")["model"] == "big"


def test_a_pinned_one_stays_and_what_does_not_fit_is_refused(several, big, small, n_bytes):
    names = (f"big={big}", f"small={small}")
    with several(*names, weights_bytes=n_bytes + 1, pinned_models="big") as live:
        refused = live.post(CHAT, asked("small"))
        assert refused.status_code == 507
        assert "small needs" in refused.json()["error"]["message"]
        assert "raise weights_bytes" in refused.json()["error"]["message"]
        assert loaded(live) == ["big"]
        assert chat(live, "big")["model"] == "big"


def test_one_in_use_does_not_go(several, big, small, n_bytes):
    """A request for another waits until it is idle, at most `load_wait_s`."""
    names = (f"big={big}", f"small={small}")
    with several(*names, weights_bytes=n_bytes + 1, load_wait_s=0.2) as live:
        with in_use(live, "big"):
            refused = live.post(CHAT, asked("small"))
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            wait_until(lambda: not live.models.slots.changing.locked())
            assert loaded(live) == ["big"]
        assert chat(live, "big")["model"] == "big"  # it takes requests again
        assert loads(live) == {"big": 1, "small": 0}


def test_who_has_left_waits_for_no_model(several, big, small, n_bytes):
    names = (f"big={big}", f"small={small}")
    with several(*names, weights_bytes=n_bytes + 1, load_wait_s=300) as live:
        slot = live.models.known("small")
        with in_use(live, "big"):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{live.url}{CHAT}", json=asked("small"), timeout=0.5, verify=False)
            wait_until(lambda: not slot.n_waiting, 20)


def test_a_model_in_use_takes_requests_while_another_waits_for_its_room(
    several, big, small, n_bytes
):
    """It could not be unloaded anyway; then the other has its turn."""
    names = (f"big={big}", f"small={small}")
    with several(*names, weights_bytes=n_bytes + 1, load_wait_s=300) as live:
        slot, answers = live.models.known("big"), []
        threads = [
            threading.Thread(target=lambda n=name: answers.append(chat(live, n)["model"]))
            for name in ("small", "big")
        ]
        with in_use(live, "big"):
            threads[0].start()
            wait_until(lambda: bool(live.models.slots._changed._waiters))
            threads[1].start()
            wait_until(lambda: slot.n_leases == 2)
        for thread in threads:
            thread.join(300)
        assert sorted(answers) == ["big", "small"]
        assert loads(live) == {"big": 1, "small": 1}


@pytest.mark.usefixtures("early_processes")
def test_others_answer_while_one_is_loaded_or_cannot_be(several, big, small, monkeypatch, tmp_path):
    """Requests for it wait, also more of them than are prepared at once."""
    go_on, began = threading.Event(), threading.Event()
    start = slots_module.start_engine

    def slow(model, *arguments, **options):
        if model.path == small:
            began.set()
            assert go_on.wait(300)
        return start(model, *arguments, **options)

    with several(f"big={big}", on_demand="*,/*") as live:
        monkeypatch.setattr(slots_module, "start_engine", slow)
        with ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(chat, live, str(small)) for _ in range(8)]
            assert began.wait(300)
            assert chat(live, "big")["model"] == "big"
            assert not any(each.done() for each in answers)
            go_on.set()
        assert [each.result()["model"] for each in answers] == [str(small)] * 8
        assert loads(live) == {"big": 1, str(small): 1}
        path = write_checkpoint(tmp_path / "broken", seed=3)
        (path / "model.safetensors").write_bytes(b"no weights at all")
        processes = psutil.Process().children()
        for _ in range(2):
            refused = live.post(CHAT, asked(str(path)))
            assert refused.status_code == 422
            assert "is not a complete safetensors file" in refused.json()["error"]["message"]
        assert psutil.Process().children() == processes  # its preparing process is gone
        assert chat(live, "big")["model"] == "big"


def test_only_what_the_operator_allowed_is_loaded(several, big, small, tmp_path):
    """A name that is no model here is an unknown name; so is a path that no path's pattern fits."""
    with several(f"big={big}", on_demand="*") as live:
        for name in (str(small), "org/name", "smollm2", "../small"):
            assert chat(live, name)["model"] == "big"
        assert loaded(live) == ["big"]
    with several(f"big={big}", on_demand=f"{small}*") as live:
        assert chat(live, str(small))["model"] == str(small)
        assert chat(live, f"{small}/.")["model"] == str(small)  # another way to write it
        for path in (tmp_path, f"{small}/../{small.name}"):
            assert chat(live, str(path))["model"] == "big"
        assert loaded(live) == ["big", str(small)]
        refused = live.post(CHAT, asked(f"{small}/config.json"))
        assert refused.status_code == 422


def test_nothing_is_loaded_on_demand_before_the_start_or_while_it_drains(
    several, big, small, third
):
    """And the server is not ready because of it."""

    def refused(path):
        assert live.post(CHAT, asked(str(path))).status_code == 503
        assert live.get("/health/ready").status_code == 503
        assert "keepwarm_ready 0.0" in live.get("/metrics").text

    with several(f"big={big}", on_demand="/*", is_started=False) as live:
        refused(small)
        live.models.start()
        assert loaded(live) == ["big"]
        assert chat(live, str(small))["model"] == str(small)
        live.models.drain(0)
        live.models.slots.offer()  # a start that ends meanwhile
        live.models.slots.offer(live.models.default)
        refused(third)
        assert loaded(live) == ["big", str(small)]


def pin(live, name, pinned=True):
    return live.post("/v1/admin/load", {"model": name, "pinned": pinned}, **ADMIN)


def test_a_pin_replaces_no_model(several, big, small):
    """Neither of one that no request has named yet, nor of one that is unknown."""
    with several(f"big={big}", on_demand="/*", admin_key="admin") as live:
        assert pin(live, str(small)).json()["model"] == str(small)
        assert loaded(live) == ["big", str(small)]
        assert live.models.known(str(small)).pinned
        assert not live.models.default.pinned
        assert pin(live, "org/name").status_code == 404
        assert loaded(live) == ["big", str(small)]


def test_a_pin_loads_the_first_again_and_an_unpin_nothing(several, big):
    """It is in the dashboard although no request may use it."""
    with several(f"big={big}", f"grand={big}", admin_key="admin") as live:
        assert live.post("/v1/admin/unload", {}, **ADMIN).status_code == 200
        shown = live.get("/v1/dashboard/models", **ADMIN).json()["data"]
        assert [(one["name"], one["loaded"], one["offered"]) for one in shown] == [
            ("big", False, False),
            ("grand", False, False),
        ]
        assert pin(live, "grand", pinned=False).json()["model"] is None
        assert loaded(live) == []
        assert pin(live, "grand").json()["model"] == "grand"
        assert live.models.default.names == ["big", "grand"]
        assert live.post("/v1/admin/unload", {}, **ADMIN).status_code == 200
        assert live.post("/v1/admin/load", {"model": "big"}, **ADMIN).status_code == 200
        chat(live, "grand")
        assert loaded(live) == ["big"]


def test_the_servers_names_load_its_first_model_again(several, big, small):
    """Also while it is loaded, and after another took its place; it keeps its names."""
    options = {"admin_key": "admin", "on_demand": "/*"}
    with several(f"big={big}", f"two={big}", **options) as live:

        def load(name):
            answer = live.post("/v1/admin/load", {"model": str(name)}, **ADMIN)
            assert answer.status_code == 200, answer.text
            return answer.json()["model"], answer.json()["previous"]

        for n_loads, name in enumerate(("big", "two", "big:latest"), 2):
            assert load(name) == ("big", "big")
            assert loads(live) == {"big": n_loads}
            assert [chat(live, each)["model"] for each in ("big", "two")] == ["big", "big"]
        assert load(small) == (str(small), "big")
        assert load(small) == (str(small), str(small))
        assert load("big") == ("big", str(small))
        assert chat(live, "big")["model"] == "big"


def test_an_unused_one_is_unloaded(several, big, small):
    with several(f"big={big}", f"small={small}", model_ttl_s=1e6, pinned_models="big") as live:
        slots = live.models.slots
        with in_use(live, "small"):
            for slot in slots.all:
                slot.used -= 2e6
            slots.unload_unused()
            assert loaded(live) == ["big", "small"]  # in use
        slots.unload_unused()
        assert loaded(live) == ["big", "small"]  # just used
        for slot in slots.all:
            slot.used -= 2e6
        slots.unload_unused()
        assert loaded(live) == ["big"]
        assert chat(live, "small")["keepwarm"]["recomputed"] <= 2
        assert loaded(live) == ["big", "small"]


def test_it_still_answers_when_all_are_unloaded(several, big):
    with several(f"big={big}", model_ttl_s=1e6) as live:
        chat(live, "big", keepwarm={"agent": "sleeper"})
        wait_until(lambda: not live.models.slots.all[0].n_leases)  # it ends after the answer
        live.models.slots.all[0].used -= 2e6
        live.models.slots.unload_unused()
        assert loaded(live) == []
        for path in ("/health/ready", "/metrics", "/v1/dashboard/now", "/v1/cache", "/v1/agents"):
            assert live.get(path).status_code == 200, path
        assert live.get("/v1/models").json()["data"][0]["context_length"] == 16384
        assert 'keepwarm_answers_total{outcome="finished"} 1.0' in live.get("/metrics").text
        assert chat(live, "big")["keepwarm"]["recomputed"] == 1


def test_counters_of_live_caches_never_go_back(several, big, small):
    """Whatever is unloaded and loaded again; those of all engines are added once."""
    with several(f"big={big}", f"small={small}") as live:
        counted = []

        def count():
            figures = live.models.stats().live
            counted.append(figures.evicted)
            return figures

        for name in ("big", "big", "small"):
            chat(live, name)
            engine = live.models.known(name).host.engine
            engine.wait_until_saved()
            n_live = engine.live.stats.entries
            engine.call(lambda engine=engine: engine.live.release(engine.live.max_bytes)).result()
            assert count().evicted == sum(counted[-2:-1]) + n_live > 0
            live.models.known(name).expires = True
            live.models.slots.unload_unused()
            count()
        assert counted == sorted(counted)
        assert len(set(counted)) == 3
        assert count().entries == 0
        chat(live, "big")
        assert count().evicted == counted[-2]
        assert count().max_bytes == live.host.engine.live.max_bytes


def test_an_agent_can_be_made_when_all_are_unloaded(several, big, small):
    """By the default, which is loaded for it; else by one that is loaded."""
    with several(f"big={big}", f"small={small}", admin_key="admin") as live:
        for slot in live.models.slots.all:
            slot.expires = True
        live.models.slots.unload_unused()
        assert loaded(live) == []
        made = live.post("/v1/agents", {"id": "first"})
        assert made.status_code == 200, made.text
        assert loaded(live) == ["big"]
        chat(live, "small")
        live.post("/v1/admin/unload", {"model": "big"}, **ADMIN)
        made = live.post("/v1/agents", {"id": "second"})
        assert made.status_code == 200, made.text
        assert loaded(live) == ["small"]


def test_expired_agents_are_forgotten_though_nobody_asks(several, big, monkeypatch):
    """Also while no model is loaded."""
    monkeypatch.setattr(models_module, "MOST_CHECKS_S", 0.05)
    monkeypatch.setattr(agent_store, "CONFIRM_S", 0.0)
    monkeypatch.setattr(agent_store, "EXPIRY_INTERVAL_S", 0.0)
    with several(f"big={big}", admin_key="admin") as live:
        for name in ("fox", "bear"):
            chat(live, "big", keepwarm={"agent": name})
        agents = live.models.store.on_disk.agents
        wait_until(lambda: {agent.id for agent in agents.all()} == {"fox", "bear"})
        assert live.post("/v1/admin/unload", {"model": "big"}, **ADMIN).status_code == 200
        agents.update("fox", retention_s=60.0)
        now = time.time() + 61 + agent_store.GRACE_S
        agents._clock = lambda: now
        wait_until(lambda: [agent.id for agent in agents.all()] == ["bear"])


def test_texts_are_forgotten_while_all_are_unloaded(several, big):
    with several(f"big={big}", admin_key="admin") as live:
        chat(live, "big", keepwarm={"agent": "sleeper"})
        assert live.post("/v1/admin/unload", {}, **ADMIN).status_code == 200
        ledger = live.models.ledger
        ledger.title_of("sleeper", 1, lambda: "What it was asked")
        assert live.models.store.forget("sleeper") > 0
        assert ledger.title_of("sleeper", 1, lambda: "") == ""
