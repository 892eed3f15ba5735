"""Agents are talked to with only what is new, through the official clients."""

from __future__ import annotations

import uuid
from dataclasses import replace

import httpx
import openai
import pytest

from tests.kit.waiting import wait_until
from tests.server.talks import plain_bias

SYSTEM = "You answer briefly."
ASK = "What is the quick brown fox?"
NEXT = "And the lazy dog?"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def agent(live):
    """The id of an agent that was just created."""
    name = f"ops-{uuid.uuid4().hex[:8]}"
    assert live.post("/v1/agents", {"id": name}).status_code == 200
    return name


@pytest.fixture
def gpt(live, agent):
    with live.openai(base_url=f"{live.url}/v1/agents/{agent}") as client:
        yield client


@pytest.fixture
def claude(live, agent):
    import anthropic

    url = f"{live.url}/v1/agents/{agent}"
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def plain(checkpoint):
    """Sampling options with which texts and tokens can be exchanged for each other."""
    return {"max_tokens": 8, "temperature": 0, "logit_bias": plain_bias(checkpoint)}


def complete(client, *messages, **options):
    asked = {"max_tokens": 8, "temperature": 0, **options}
    return client.chat.completions.create(model="any", messages=messages, **asked)


def test_openais_client_with_the_agent_as_its_base_url(live, gpt, plain):
    def whole(*messages):
        """What a client gets that sends everything, and leaves no trace."""
        body = {"messages": messages, **plain}
        return live.post("/v1/chat/completions", body, **{"X-Keepwarm-Cache": "read-only"}).json()

    system = {"role": "system", "content": SYSTEM}
    first = complete(gpt, system, user(ASK), **plain)
    assert first.keepwarm["continued"] == 0
    said = assistant(first.choices[0].message.content)
    second = complete(gpt, user(NEXT), **plain)
    expected = whole(system, user(ASK), said, user(NEXT))
    assert second.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert second.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert second.keepwarm["continued"] >= first.usage.total_tokens - 1
    assert second.keepwarm["recomputed"] < second.usage.prompt_tokens / 2

    stream = complete(gpt, user("Why?"), stream=True, **plain)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    talk = [system, user(ASK), said, user(NEXT), assistant(second.choices[0].message.content)]
    expected = whole(*talk, user("Why?"))
    assert streamed == expected["choices"][0]["message"]["content"]


def test_anthropics_client_with_the_agent_as_its_base_url(live, agent, claude):
    """Its answers are those that OpenAI's client gets from a fork."""
    asked = {"model": "any", "max_tokens": 8, "system": SYSTEM, "extra_body": {"temperature": 0}}
    first = claude.messages.create(messages=[user(ASK)], **asked)
    for number, question in enumerate((NEXT, "Why?")):
        fork = f"{agent}-{number}"
        assert live.post(f"/v1/agents/{agent}/fork", {"id": fork}).status_code == 200
        with live.openai(base_url=f"{live.url}/v1/agents/{fork}") as client:
            expected = complete(client, user(question))
        if number:
            with claude.messages.stream(messages=[user(question)], **asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = claude.messages.create(messages=[user(question)], **asked)
        assert answer.content[0].text == expected.choices[0].message.content
        usage = answer.usage
        read, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens or 0
        assert usage.input_tokens + read + created == expected.usage.prompt_tokens
        assert read > first.usage.output_tokens


def test_a_header_and_a_field_do_the_same(live, agent):
    named = {"X-Keepwarm-Agent": agent}
    body = {"messages": [user(ASK)], "max_tokens": 8, "temperature": 0}
    first = live.post("/v1/chat/completions", body, **named).json()
    go_on = {**body, "messages": [user(NEXT)], "keepwarm": {"continue": True}}
    second = live.post("/v1/chat/completions", go_on, **named).json()
    assert second["keepwarm"]["continued"] >= first["usage"]["total_tokens"] - 1
    assert "continued" not in first["keepwarm"]
    third = live.post("/v1/messages", go_on, **named).json()
    assert third["keepwarm"]["continued"] > second["keepwarm"]["continued"]
    fourth = live.post("/v1/responses", {**go_on, "input": "Why?"}, **named).json()
    assert fourth["keepwarm"]["continued"] > third["keepwarm"]["continued"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_an_agent_can_be_made_to_call_one_of_its_tools(agent, gpt, choice):
    look = {"type": "function", "function": {"name": "look", "parameters": {"const": {}}}}
    complete(gpt, user(ASK), tools=[look])
    answer = complete(gpt, user(NEXT), tool_choice=choice, max_tokens=200)
    assert answer.choices[0].message.tool_calls[0].function.name == "look"
    with pytest.raises(openai.BadRequestError, match="not in tools"):
        complete(gpt, user(NEXT), tool_choice={"type": "function", "function": {"name": "hear"}})


def test_after_a_fork_a_rewind_and_an_import(live, agent, gpt):
    complete(gpt, user(ASK))
    complete(gpt, user(NEXT))
    fork = f"{agent}-fork"
    assert live.post(f"/v1/agents/{agent}/fork", {"id": fork}).status_code == 200
    assert live.post(f"/v1/agents/{agent}/rewind", {"turn": 1}).status_code == 200
    bundle = live.get(f"/v1/agents/{fork}/export").content
    guest = f"{agent}-guest"
    sent = live.post(f"/v1/agents/import?id={guest}", bundle)
    assert sent.status_code == 200, sent.text
    said = {name: live.get(f"/v1/agents/{name}").json() for name in (agent, fork, guest)}
    for name, n_turns in ((agent, 1), (fork, 2), (guest, 2)):
        with live.openai(base_url=f"{live.url}/v1/agents/{name}") as client:
            answer = complete(client, user("Why?"))
        assert said[name]["turns"][-1] - answer.keepwarm["continued"] in (0, 1)
        assert len(live.get(f"/v1/agents/{name}").json()["turns"]) == n_turns + 1


def test_who_is_not_there_is_refused_in_the_words_of_the_api(live):
    import anthropic

    url = f"{live.url}/v1/agents/nobody"
    gpt, claude = live.openai(base_url=url), anthropic.Anthropic(base_url=url, api_key="any")
    with gpt, pytest.raises(openai.NotFoundError, match="no agent 'nobody'"):
        complete(gpt, user(ASK))
    with claude, pytest.raises(anthropic.NotFoundError, match="no agent 'nobody'"):
        claude.messages.create(model="any", max_tokens=4, messages=[user(ASK)])
    odd = live.post("/v1/agents/-/chat/completions", {"messages": [user(ASK)]})
    assert odd.status_code == 400
    both = {"input": "Why?", "previous_response_id": "resp_1", "keepwarm": {"continue": True}}
    refused = live.post("/v1/responses", both, **{"X-Keepwarm-Agent": "ops"})
    assert refused.status_code == 400
    assert "previous_response_id" in refused.json()["error"]["message"]


def test_a_key_cannot_continue_the_agent_of_another(serving):
    body = {"messages": [user(ASK)], "max_tokens": 4}
    with serving(api_keys="alice-key,bob-key") as live:
        alice, bob = ({"Authorization": f"Bearer {name}-key"} for name in ("alice", "bob"))
        live.post("/v1/chat/completions", body, **alice, **{"X-Keepwarm-Agent": "ops"})
        assert live.post("/v1/agents/ops/chat/completions", body, **alice).status_code == 200
        refused = live.post("/v1/agents/ops/chat/completions", body, **bob)
        assert refused.status_code == 404
        (stored,) = live.host.engine.store.on_disk.agents.all()
        named = live.post(f"/v1/agents/{stored.id}/chat/completions", body, **bob)
        assert named.status_code == 404


def test_an_agent_is_compacted_and_its_next_turn_starts_warm(live, agent, gpt):
    complete(gpt, {"role": "system", "content": SYSTEM}, user(ASK))
    last = complete(gpt, user(NEXT))
    answer = live.post(f"/v1/agents/{agent}/compact", {"max_tokens": 8})
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert made["summary"]
    assert made["keepwarm"]["continued"] >= last.usage.total_tokens - 1
    reply = complete(gpt, user("Why?"))
    assert made["n_tokens"] - reply.keepwarm["continued"] in (0, 1)
    assert sum(reply.keepwarm["reused"].values()) >= made["n_tokens"] - 1
    assert live.post("/v1/agents/nobody/compact", {}).status_code == 404


def test_an_agent_whose_client_has_left_is_not_compacted(live, agent, gpt, monkeypatch):
    """The summary, which would be endless, ends with its client."""
    complete(gpt, user(ASK))
    before = live.get(f"/v1/agents/{agent}").json()
    engine, submit = live.host.engine, live.host.submit

    def endless(request, slot):
        sampling = replace(request.sampling, logit_bias={2: -100})
        return submit(replace(request, sampling=sampling), slot)

    monkeypatch.setattr(live.host, "submit", endless)
    path = f"{live.url}/v1/agents/{agent}/compact"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(path, json={"max_tokens": 9000}, timeout=0.3, verify=False)
    wait_until(lambda: engine.requests()[-1].state == "cancelled", 60)
    assert live.get(f"/v1/agents/{agent}").json() == before
