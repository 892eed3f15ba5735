"""Over HTTP: what holds where a request is silent, and where it is shown."""

import json
from dataclasses import replace

import pytest

from keepwarm import config
from keepwarm.models.load import load
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import serve

MAKERS = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
SHOWN = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@pytest.fixture
def served(served_model, tmp_path):
    """A function: a server whose model has this file, with these settings."""

    def start(**values):
        settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, **values)
        return serve(replace(served_model, generation_config=MAKERS), settings)

    return start


def test_the_list_of_models_and_a_response_show_it(served):
    with served() as live, live.openai() as client:
        (model,) = live.get("/v1/models").json()["data"]
        assert model["sampling"] == SHOWN
        silent = client.responses.create(model="m", input="Hello", max_output_tokens=2)
        assert (silent.temperature, silent.top_p) == (0.6, 0.95)
        kept = client.responses.retrieve(silent.id)
        assert (kept.temperature, kept.top_p) == (0.6, 0.95)
        asked = {"max_output_tokens": 2, "temperature": 0, "top_p": 0.5}
        exact = client.responses.create(model="m", input="Hello", **asked)
        assert (exact.temperature, exact.top_p) == (0, 0.5)


@pytest.mark.parametrize(
    ("settings", "temperature"), [({"sampling": "greedy"}, 0.0), ({"temperature": 0.3}, 0.3)]
)
def test_the_operator_speaks_first(served, settings, temperature):
    with served(**settings) as live:
        assert live.get("/v1/models/tiny").json()["sampling"]["temperature"] == temperature


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
def test_every_api_leaves_open_what_it_is_not_told(served, path, body):
    """Draws of a hot model are not all equal; with a temperature of 0 they are."""
    with served(temperature=100) as live:
        said = {_text(live.post(path, {"max_tokens": 8, **body})) for _ in range(6)}
        exact = {_text(live.post(path, {"max_tokens": 8, "temperature": 0, **body})) for _ in "12"}
    assert len(said) > 1
    assert len(exact) == 1


def _text(answer):
    assert answer.status_code == 200, answer.text
    said = answer.json()
    if "choices" in said:
        choice = said["choices"][0]
        return choice.get("text") or choice["message"]["content"]
    return json.dumps([part for item in said.get("output", []) for part in item["content"]]) + (
        json.dumps(said.get("content"))
    )


def test_the_file_is_read_with_the_model(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "model")
    (checkpoint / "generation_config.json").write_text(json.dumps(MAKERS))
    assert load(str(checkpoint), config.load({})).generation_config == MAKERS
    (checkpoint / "generation_config.json").write_text("{")  # which mlx-lm ignores too
    assert load(str(checkpoint), config.load({})).generation_config == {}
    (checkpoint / "generation_config.json").unlink()
    assert load(str(checkpoint), config.load({})).generation_config == {}
