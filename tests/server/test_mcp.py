"""`/mcp`, by the SDK's own client against a real server: only the caller's own agents."""

import asyncio
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from keepwarm import config
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput
from keepwarm.server.mcp import memory_endpoint

ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
SAFE = ["list_agents", "show_agent", "pin_agent", "fork_agent", "rewind_agent", "explain_last_miss"]
ALL = [*SAFE, "delete_agent", "compact_agent"]


@pytest.fixture(scope="module")
def live(serving):
    with serving(api_keys="one,two", mcp="all") as server:
        talk(server, ONE, "fox")
        talk(server, TWO, "bear", "Where does the bear sleep?")
        yield server


def talk(live, key, agent, text="What does the fox say to the dog?"):
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answer = live.post("/v1/chat/completions", body, **{"X-Keepwarm-Agent": agent, **key})
    assert answer.status_code == 200, answer.text


def session(live, headers, work):
    """What `work` does with a client of this server. Its SDK takes a second to import."""
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    async def run():
        async with httpx2.AsyncClient(headers=headers, timeout=300) as http:
            transport = streamable_http_client(f"{live.url}/mcp", http_client=http)
            async with Client(transport) as client:
                return await work(client)

    return asyncio.run(run())


def calls(live, headers, *asked):
    """Results of tools, one after the other; those of errors are their text."""

    async def work(client):
        found = [await client.call_tool(name, arguments) for name, arguments in asked]
        texts = [each.content[0].text for each in found]
        both = zip(texts, found, strict=True)
        return [text if each.is_error else json.loads(text) for text, each in both]

    return session(live, headers, work)


def test_a_key_sees_and_manages_its_own_agents(live):
    listed, shown, forked, pinned, rewound, loose = calls(
        live,
        ONE,
        ("list_agents", {}),
        ("show_agent", {"agent": "fox"}),
        ("fork_agent", {"agent": "fox", "new_agent": "vixen"}),
        ("pin_agent", {"agent": "vixen"}),
        ("rewind_agent", {"agent": "vixen", "turn": 0}),
        ("pin_agent", {"agent": "vixen", "pinned": False}),
    )
    assert [agent["id"] for agent in listed["agents"]] == ["fox"]
    assert listed["n_agents"] == 1
    assert shown["n_tokens"] > 0
    assert forked["forked_from"] == "fox"
    assert forked["n_tokens"] == shown["n_tokens"]
    assert (pinned["pinned"], loose["pinned"]) == (True, False)
    assert (rewound["n_tokens"], rewound["turns"]) == (0, [])
    over_http = live.get("/v1/agents", **ONE).json()["data"]
    assert {agent["id"] for agent in over_http} == {"fox", "vixen"}


def test_another_key_sees_none_of_them(live):
    listed, *others = calls(
        live,
        TWO,
        ("list_agents", {}),
        *(("show_agent", {"agent": name}) for name in ("fox", "one.fox")),
        ("pin_agent", {"agent": "fox"}),
        ("fork_agent", {"agent": "fox", "new_agent": "mine"}),
        ("rewind_agent", {"agent": "fox", "turn": 0}),
        ("delete_agent", {"agent": "fox"}),
        ("compact_agent", {"agent": "fox"}),
    )
    assert [agent["id"] for agent in listed["agents"]] == ["bear"]
    assert all("no agent" in said for said in others), others
    assert live.get("/v1/agents/fox", **ONE).json()["turns"]


def test_the_last_miss_is_explained_to_its_own_key(live):
    said = "The user asks the assistant what the answer to the question is. " * 4
    talk(live, ONE, "asked", f"{said} Now it is the first day.")
    talk(live, ONE, "asked", f"Another begin. {said} Now it is the first day.")
    own, of_agent, of_other = calls(
        live,
        ONE,
        ("explain_last_miss", {}),
        ("explain_last_miss", {"agent": "asked"}),
        ("explain_last_miss", {"agent": "fox"}),
    )
    assert own == of_agent
    assert own["miss"]["agent"] == "asked"
    assert own["miss"]["reason"] == "changed"
    assert "Another begin" in own["miss"]["text"]["now"]
    assert "The user asks" in own["miss"]["text"]["earlier"]
    assert of_other == {"miss": None}
    assert calls(live, TWO, ("explain_last_miss", {})) == [{"miss": None}]


def test_an_agent_is_compacted_and_deleted_where_that_is_allowed(live):
    talk(live, ONE, "long", "What is the answer to the question of the user? " * 6)
    before, made, deleted, gone = calls(
        live,
        ONE,
        ("show_agent", {"agent": "long"}),
        ("compact_agent", {"agent": "long", "instruction": "Name the animal."}),
        ("delete_agent", {"agent": "long"}),
        ("show_agent", {"agent": "long"}),
    )
    assert made["n_before"] > before["n_tokens"]
    assert deleted["deleted"] is True
    assert "no agent 'long'" in gone


@pytest.mark.parametrize("tool", ["show_agent", "compact_agent"])
def test_a_tool_that_waits_for_the_disk_keeps_no_request_waiting(serving, monkeypatch, tool):
    """Of its own key, which has one permit on two cores."""
    looking, may_end = threading.Event(), threading.Event()

    def wait(_):
        looking.set()
        assert may_end.wait(300)

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with serving(api_keys="one,two", mcp="all") as live, ThreadPoolExecutor(2) as pool:
        talk(live, ONE, tool)
        monkeypatch.setattr(Engine, "wait_until_saved", wait)
        waiting = pool.submit(calls, live, ONE, (tool, {"agent": tool}))
        assert looking.wait(300)
        try:
            pool.submit(talk, live, ONE, "other").result(60)
        finally:
            may_end.set()
        waiting.result()


def test_wrong_arguments_are_one_sentence(live):
    missing, unknown, strange = calls(
        live,
        ONE,
        ("rewind_agent", {"agent": "fox"}),
        ("rewind_agent", {"agent": "fox", "turn": 99}),
        ("show_agent", {"agent": "../fox"}),
    )
    assert missing == "turn: Field required."
    assert "has 1 turns" in unknown
    assert strange.startswith("agent: String should match")


def test_what_destroys_is_not_offered_unless_it_is_allowed(serving, live):
    async def names(client):
        return [(tool.name, tool.input_schema) for tool in (await client.list_tools()).tools]

    assert [name for name, _ in session(live, ONE, names)] == ALL
    with serving(mcp="on") as careful:
        listed = dict(session(careful, {}, names))
        assert list(listed) == SAFE
        (said,) = calls(careful, {}, ("delete_agent", {"agent": "fox"}))
        assert said.startswith("There is no tool 'delete_agent' here; there are list_agents,")
    assert listed["fork_agent"]["required"] == ["agent", "new_agent"]


def test_the_checks_of_every_endpoint_hold(live, serving):
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    accept = {"Accept": "application/json, text/event-stream"}
    assert live.post("/mcp", ping, **accept).status_code == 401
    assert live.post("/mcp", ping, **accept, Authorization="Bearer three").status_code == 401
    assert live.post("/mcp", ping, **accept, **ONE).status_code == 200
    foreign = live.post("/mcp", ping, **accept, **ONE, Origin="https://evil.example")
    assert foreign.status_code == 403
    rebound = live.post("/mcp", ping, **accept, **ONE, Host="evil.example")
    assert rebound.status_code == 403
    assert live.get("/mcp", **ONE).status_code == 405
    with serving() as plain:
        assert plain.post("/mcp", ping, **accept).status_code == 404


def test_without_the_package_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server.streamable_http_manager", None)
    with pytest.raises(BadInput, match=r"install keepwarm\[mcp\]"):
        memory_endpoint(None, config.load({}, mcp="on"))
    assert memory_endpoint(None, config.load({})) is None
