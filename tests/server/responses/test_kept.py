"""Stored responses survive a restart, for a time and up to a size, and go with their agent."""

import asyncio
import os
import time

import httpx
import pytest

from keepwarm.cache.agents.branch import Branch
from keepwarm.cache.disk_store import DiskStore
from keepwarm.cache.store import Store
from keepwarm.cache.texts.files import AgentTexts
from keepwarm.errors import UnknownResponse
from keepwarm.prefix.blocks import Namespace
from keepwarm.server.responses.kept_responses import KeptResponses
from keepwarm.server.responses.shapes import Item
from keepwarm.store.disk.disk import DiskTier
from tests.kit.waiting import wait_until

DAY_S = 86400.0
RESPONSE = {"id": "resp_1", "created_at": time.time(), "output": []}
ITEMS = [Item(role="user", content="Hi", id="msg_1")]
TO_OPS = {"X-Keepwarm-Agent": "ops"}


def ask(live, text, **fields):
    agent = fields.pop("headers", {})
    answer = live.post("/v1/responses", {"input": text, "max_output_tokens": 4, **fields}, **agent)
    assert answer.status_code == 200, answer.text
    return answer.json()


def files(home):
    return [path for path in (home / "store" / "responses").glob("*") if path.is_file()]


@pytest.mark.parametrize("key", ["", "a long enough secret"], ids=["plain", "sealed"])
def test_a_conversation_goes_on_after_a_restart(serving, tmp_path, key):
    with serving(home=tmp_path, encryption_key=key) as live:
        first = ask(live, "Who is the quick brown fox?", headers=TO_OPS)
    (file,) = files(tmp_path)
    assert (b"quick" in file.read_bytes()) == (not key)
    assert ("ops" in file.name) == (not key)
    with serving(home=tmp_path, encryption_key=key) as live:
        again = live.get(f"/v1/responses/{first['id']}")
        assert again.json() == first
        listed = live.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
        assert listed[0]["content"] == "Who is the quick brown fox?"
        second = ask(live, "Why?", previous_response_id=first["id"])
        known = first["usage"]["input_tokens"]
        assert second["usage"]["input_tokens"] > known
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > known
        assert live.get("/v1/responses/../../etc").status_code == 404


def test_who_deletes_an_agent_deletes_its_responses(serving, tmp_path):
    with serving(home=tmp_path, admin_key="root") as live:
        of_agent, other = ask(live, "Who?", headers=TO_OPS), ask(live, "Who?")
        wait_until(lambda: len(files(tmp_path)) == 2)
        store = live.host.engine.store
        live.host.engine.settle()
        store.on_disk.agents.delete("ops")  # as another process does
        wait_until(lambda: len(files(tmp_path)) == 1)
        assert live.get(f"/v1/responses/{of_agent['id']}").status_code == 404
        assert live.get(f"/v1/responses/{other['id']}").status_code == 200

        again = ask(live, "Who?", headers=TO_OPS)
        assert live.get(f"/v1/responses/{again['id']}").status_code == 200
        request = live.host.engine  # recorded in the background
        request.settle()
        deleted = httpx.delete(f"{live.url}/v1/agents/ops", timeout=300)
        assert deleted.status_code == 200
        assert live.get(f"/v1/responses/{again['id']}").status_code == 404
        httpx.delete(f"{live.url}/v1/responses/{other['id']}", timeout=300)
        assert not files(tmp_path)
        last = ask(live, "Who?")
        assert live.get(f"/v1/responses/{last['id']}").status_code == 200
        admin = {"Authorization": "Bearer root"}
        assert live.post("/v1/cache/clear", {"disk": True}, **admin).status_code == 200
        assert live.get(f"/v1/responses/{last['id']}").status_code == 404


def test_what_may_not_be_on_disk_is_in_memory_only(serving, tmp_path):
    with serving(home=tmp_path) as live:
        kept = ask(live, "Who?", headers={"X-Keepwarm-Cache": "ephemeral"})
        assert live.get(f"/v1/responses/{kept['id']}").status_code == 200
        ask(live, "Who?", store=False)
    assert not files(tmp_path)
    with serving(home=tmp_path, response_ttl_s=0) as live:
        kept = ask(live, "Who?")
        assert live.get(f"/v1/responses/{kept['id']}").status_code == 200
    assert not files(tmp_path)


@pytest.fixture
def texts(tmp_path):
    disk = DiskTier(tmp_path)
    yield AgentTexts(disk, "responses", max_bytes=1000)
    disk.close()


def test_the_oldest_texts_go_first(texts, tmp_path):
    for number in range(5):
        texts.put("ops", f"text {number}", b"x" * 300, DAY_S)
        path = texts.path_of("ops", f"text {number}")
        os.utime(path, (0, time.time() - 100 + number))
    foreign = tmp_path / "responses" / "notes.txt"
    foreign.write_text("mine")
    texts.put("", "last", b"x" * 300, DAY_S)
    found = [bool(texts.get(f"text {number}", DAY_S)) for number in range(5)]
    assert found == [False, False, False, True, True]
    assert texts.get("text 4", ttl_s=10) is None  # too old
    texts.put("", "later", b"x", ttl_s=10)
    assert not texts.path_of("ops", "text 4").exists()
    assert texts.get("last", DAY_S)
    assert foreign.exists()


def test_a_name_is_no_pattern_and_no_path(texts):
    texts.put("ops", "one", b"1", DAY_S)
    for name in ("*", "../one", "one\0", "\udcff"):
        assert texts.get(name, DAY_S) is None
    texts.remove("*")
    texts.remove_agent("op")
    assert texts.get("one", DAY_S) == b"1"


def test_a_damaged_file_is_a_response_that_is_not_stored(texts, tmp_path):
    path = texts.path_of("ops", "/resp_1")
    with Store(tmp_path) as store:
        kept = KeptResponses(lambda: store, DAY_S)
        kept.put(
            "", RESPONSE, [Item(role="user", content="Hi")], 1, since=store.catch_up(), agent="ops"
        )
        kept.close()
        for damage in (b"", b"{", b"[]", b'{"version": 1}', b'{"version": 2}'):
            path.write_bytes(damage)
            with pytest.raises(UnknownResponse):
                asyncio.run(KeptResponses(lambda: store, DAY_S).get("", "resp_1"))


def test_responses_in_memory_go_with_their_agent(tmp_path):
    """Deleted by another process; also if its request ends only then, written or not."""
    with Store(tmp_path) as store, DiskStore(tmp_path) as other:
        asyncio.run(_respond_and_delete(store, other))


async def _respond_and_delete(store, other):
    for to_disk in (True, False):
        kept = KeptResponses(lambda: store, DAY_S)
        other.agents.create("ops", Branch(Namespace(b"n" * 32)))
        since = await kept.begin()
        kept.put("", RESPONSE, ITEMS, 1, since=since, agent="ops", to_disk=to_disk)
        assert kept.item("", "msg_1")
        await asyncio.to_thread(other.agents.delete, "ops")
        await kept.begin()  # so does the writer's thread, every half second
        late = RESPONSE | {"id": "resp_2"}
        kept.put("", late, ITEMS, 1, since=since, agent="ops", to_disk=to_disk)
        await asyncio.to_thread(kept.close)
        assert kept.item("", "msg_1") is None
        for name in ("resp_1", "resp_2"):
            with pytest.raises(UnknownResponse):
                await KeptResponses(lambda: store, DAY_S).get("", name)


def test_a_response_that_is_written_too_late_is_removed(tmp_path, monkeypatch):
    """Its agent is deleted, with its files, between the answer and the write."""
    with Store(tmp_path) as store, DiskStore(tmp_path) as other:
        other.agents.create("ops", Branch(Namespace(b"n" * 32)))
        kept, since = KeptResponses(lambda: store, DAY_S), store.catch_up()
        texts = store.on_disk.agents.responses
        put = texts.put

        def delete_first(*arguments):
            other.agents.delete("ops")
            put(*arguments)

        monkeypatch.setattr(texts, "put", delete_first)
        kept.put("", RESPONSE, ITEMS, 1, since=since, agent="ops")
        kept.close()
        assert list((tmp_path / "responses").glob("*")) == []
