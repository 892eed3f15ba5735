"""What SDKs read beside the answer: models, request ids, fingerprints."""

import anthropic
import pytest

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def claude(live):
    return live.anthropic()


def test_anthropics_client_gets_models_in_its_form(live, claude):
    (model,) = claude.models.list()
    assert (model.id, model.type, model.lifecycle) == ("tiny", "model", "active")
    assert model.created_at.timestamp() == live.host.created
    assert model.max_input_tokens == live.host.engine.model.n_context
    assert claude.models.retrieve("tiny") == model
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("other")
    (same,) = live.openai().models.list()
    assert (same.id, same.object) == ("tiny", "model")


def test_answers_have_the_request_id_that_their_client_reads(live, claude):
    message = claude.messages.create(model="x", messages=USER, max_tokens=1)
    assert message._request_id.startswith("req-")
    chat = live.openai().chat.completions.create(model="x", messages=USER, max_tokens=1)
    assert chat._request_id.startswith("req-")


def test_a_fingerprint_names_the_model_and_its_options(live, serving):
    def fingerprints(live):
        client = live.openai()
        asked = {"model": "x", "max_tokens": 1}
        chat = client.chat.completions.create(**asked, messages=USER)
        text = client.completions.create(**asked, prompt="Hi")
        chunks = client.chat.completions.create(**asked, messages=USER, stream=True)
        return {each.system_fingerprint for each in (chat, text, *chunks)}

    (plain,) = fingerprints(live)
    assert fingerprints(live) == {plain}
    with serving(max_kv_size=4096) as other:
        assert fingerprints(other).isdisjoint({plain})
