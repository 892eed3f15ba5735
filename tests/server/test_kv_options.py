"""KV options of the whole server, and how one request turns them off."""

import pytest

from keepwarm import config
from keepwarm.errors import KeepwarmError
from keepwarm.models.load import load
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import serve

TEXT = "The quick brown fox jumps over the lazy dog."


def settings_of(home, **values):
    return config.load({"KEEPWARM_HOME": str(home)}, **values)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A model with heads that can be quantised."""
    home = tmp_path_factory.mktemp("quantised")
    settings = settings_of(home, kv_bits=8, kv_group_size=32, context=512)
    path = write_checkpoint(home / "wide", shape={"head_dim": 64})
    with serve(load(str(path), settings), settings) as live:
        yield live


def receipt(live, keepwarm=None, **headers):
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
    answer = live.post("/v1/chat/completions", body | {"keepwarm": keepwarm or {}}, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["keepwarm"]


@pytest.mark.parametrize("options", [{}, {"kv": {}}, {"explain": True}, {"exact": False}])
def test_requests_that_say_nothing_have_the_servers_options(quantised, options):
    assert receipt(quantised, options)["inexact"] == ["quantised"]


@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"kv": None}, {"kv": {"kv_bits": None}}, {"kv": {"max_kv_size": None}}],
)
def test_one_request_turns_them_off(quantised, options):
    found = receipt(quantised, options)
    assert found["exact"]
    assert "inexact" not in found


def test_a_request_may_name_others(quantised):
    assert receipt(quantised, {"kv": {"kv_bits": 4, "kv_group_size": 32}})["exact"] is False
    assert receipt(quantised, {"kv": {"max_kv_size": 16}})["inexact"] == ["bounded"]


def test_exact_and_options_are_refused_together(quantised):
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
    wrong = {"exact": True, "kv": {"kv_bits": 8}}
    answer = quantised.post("/v1/chat/completions", body | {"keepwarm": wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "keepwarm.exact"


def test_the_context_is_told_and_holds(quantised):
    (model,) = quantised.get("/v1/models").json()["data"]
    assert model["context_length"] == 512
    answer = quantised.post("/v1/completions", {"prompt": [5] * 512, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = quantised.post("/v1/completions", {"prompt": [5] * 509, "max_tokens": 9})
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kv_bits": 8, "max_kv_size": 64}, "max_kv_size and kv_bits cannot be combined"),
        ({"kv_bits": 8, "kv_group_size": 128}, "does not run with these KV options"),
    ],
)
def test_what_the_model_cannot_take_is_refused_at_the_start(served_model, tmp_path, values, says):
    settings = settings_of(tmp_path, **values)
    with pytest.raises(KeepwarmError, match=says), serve(served_model, settings):
        pass
