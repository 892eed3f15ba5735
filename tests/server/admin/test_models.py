"""Changing the model while the server runs."""

import json
import shutil
import threading
import weakref

import pytest

from keepwarm import config
from keepwarm.cache.store import Store
from keepwarm.errors import Busy
from keepwarm.models.load import load
from keepwarm.server.admin.models import ResidentModel
from keepwarm.server.models.host import EngineHost, start_engine
from keepwarm.server.models.models import Models
from tests.kit.checkpoints import write_checkpoint
from tests.kit.waiting import wait_until
from tests.server.conftest import serve

ADMIN = {"Authorization": "Bearer admin"}
QUESTION = {"messages": [{"role": "user", "content": "What is the answer?"}], "max_tokens": 4}
ENDLESS = QUESTION | {"logit_bias": {"2": -100}}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("other"), seed=1, n_context=512)


@pytest.fixture(scope="module")
def changing(checkpoint, tmp_path_factory):
    """A server that holds the only reference to its model, so that it can be freed."""
    home = str(tmp_path_factory.mktemp("home"))
    settings = config.load({"KEEPWARM_HOME": home}, admin_key="admin", on_demand="/*")
    with serve(load(str(checkpoint), settings), settings) as live:
        yield live


@pytest.fixture
def admin(changing, checkpoint):
    """The same with its first model loaded."""
    if changing.host.loaded is None or resident(changing)["id"] != str(checkpoint):
        assert change(changing, "load", {"model": str(checkpoint)}).status_code == 200
    return changing


def change(live, verb, body, **headers):
    return live.post(f"/v1/admin/{verb}", body, **(headers or ADMIN))


def resident(live):
    return live.get("/v1/models").json()["data"][0]


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer a"}, {"x-api-key": "wrong"}])
def test_it_takes_the_admin_key(serving, headers):
    with serving(api_keys="a", admin_key="admin") as live:
        for verb in ("load", "unload"):
            assert change(live, verb, {}, **headers).status_code in {401, 403}
        assert live.host.ready


def test_without_an_admin_key_it_is_forbidden(live):
    answer = live.post("/v1/admin/unload", {})
    assert answer.status_code == 403
    assert "KEEPWARM_ADMIN_KEY" in answer.json()["error"]["message"]


def test_model_that_is_loaded_takes_the_place_of_the_first(admin, checkpoint, other):
    """The first is warm when it comes back, and its blocks are not the other's."""
    n_tokens = admin.post("/v1/chat/completions", QUESTION).json()["usage"]["prompt_tokens"]
    answer = change(admin, "load", {"model": str(other)})
    named = {"model": str(other), "previous": str(checkpoint)}
    assert answer.json() == {"object": "model.resident", **named}
    assert resident(admin)["id"] == str(other)
    assert resident(admin)["context_length"] == 512
    theirs = admin.post("/v1/chat/completions", QUESTION).json()
    assert theirs["model"] == str(other)
    assert theirs["keepwarm"]["reused"] == {}
    change(admin, "load", {"model": str(checkpoint)})
    again = admin.post("/v1/chat/completions", QUESTION).json()["keepwarm"]
    assert sum(again["reused"].values()) == n_tokens - 1


def test_the_first_is_gone_when_the_second_comes(checkpoint, other, tmp_path):
    """One model is resident at a time, so it is the least recently used one."""
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, on_demand="/*")
    with Store(settings=settings) as store:
        host = EngineHost(start_engine(load(str(checkpoint), settings), store, settings), "first")
        first = weakref.ref(host.engine.model.module)
        ResidentModel(Models(host, settings), settings).load(str(other), 0)
        assert host.ready
        assert first() is None
        host.close()


def damage(path):
    (path / "model.safetensors").write_bytes(b"no weights at all")


def end_the_program(path):
    """mlx-lm's `olmo` calls `sys.exit` where its own package is not installed."""
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"model_type": "olmo"}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (damage, "is not a complete safetensors file"),
        (end_the_program, "'olmo', which mlx-lm cannot run here"),
    ],
)
def test_old_model_comes_back_if_the_new_one_cannot_be_loaded(
    admin, checkpoint, other, tmp_path, spoil, says
):
    path = tmp_path / "spoilt"
    shutil.copytree(other, path)
    spoil(path)
    before = admin.post("/v1/chat/completions", QUESTION).json()
    answer = change(admin, "load", {"model": str(path)})
    assert answer.status_code == 422
    assert says in answer.json()["error"]["message"]
    assert admin.get("/health/ready").status_code == 200
    assert resident(admin)["id"] == str(checkpoint)
    after = admin.post("/v1/chat/completions", QUESTION).json()
    assert after["choices"] == before["choices"]
    assert after["keepwarm"]["recomputed"] == 1


def test_what_is_no_model_at_all_changes_nothing(admin, tmp_path):
    engine = admin.host.engine
    for name in ("no-such-model", str(tmp_path), "org/name"):
        assert change(admin, "load", {"model": name}).status_code in {404, 422}
    assert admin.host.engine is engine


def test_paths_are_refused_unless_allowed(serving, other):
    with serving(admin_key="admin") as live:
        engine = live.host.engine
        answer = change(live, "load", {"model": str(other)})
        assert answer.status_code == 404
        assert "keepwarm pull" in answer.json()["error"]["message"]
        assert live.host.engine is engine


def test_without_a_model_it_says_so(admin, checkpoint):
    assert change(admin, "unload", {}).json()["previous"] == str(checkpoint)
    assert admin.get("/health/live").status_code == 200
    assert admin.get("/health/ready").status_code == 503
    refused = admin.post("/v1/chat/completions", QUESTION)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "keepwarm_ready 0.0" in admin.get("/metrics").text
    assert change(admin, "unload", {}).json()["previous"] is None
    assert change(admin, "load", {"model": str(checkpoint)}).status_code == 200
    assert admin.post("/v1/chat/completions", QUESTION).status_code == 200


@pytest.mark.parametrize(
    ("n_tokens", "drain_s", "end"),
    [(500, 300, '"length"'), (12_000, 0.1, "shutting down")],
)
def test_answers_that_run_may_end_first(admin, other, n_tokens, drain_s, end):
    """An answer that ends in time is complete; a longer one ends with an error."""
    body, texts = ENDLESS | {"max_tokens": n_tokens, "stream": True}, []

    def read():
        texts.append(admin.post("/v1/chat/completions", body).text)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: admin.host.engine.stats().decoding == 1)
    assert change(admin, "load", {"model": str(other), "drain_s": drain_s}).status_code == 200
    thread.join(300)
    assert end in texts[0]


def test_one_change_at_a_time(live):
    resident = ResidentModel(Models(live.host, live.settings), live.settings)
    with resident._exclusive(), pytest.raises(Busy, match="being changed"):
        resident.unload(0)
    assert live.host.ready
