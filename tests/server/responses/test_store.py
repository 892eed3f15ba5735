"""Stored responses survive a restart, for a time and up to a size, and go with their agent."""

import asyncio
import json
import os
import time
from contextlib import contextmanager, suppress

import httpx
import pytest
from pydantic_core import to_json

from keepwarm.agents.agent import Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.texts import AgentTexts
from keepwarm.cache.store import Store
from keepwarm.errors import UnknownResponse
from keepwarm.prefix.blocks import Namespace
from keepwarm.server.responses.events import item_id, response_of_item
from keepwarm.server.responses.request import Item
from keepwarm.server.responses.store import ENTRY_BYTES, ResponseStore
from keepwarm.store.disk.disk import DiskTier
from tests.kit.waiting import wait_until

DAY_S = 86400.0
ITEMS = [Item(role="user", content="Hi", id="msg_1")]
TO_OPS = {"X-Keepwarm-Agent": "ops"}


async def has(responses, tenant, response_id):
    with suppress(UnknownResponse):
        return bool(await responses.get(tenant, response_id))
    return False


def ask(live, text, **fields):
    agent = fields.pop("headers", {})
    answer = live.post("/v1/responses", {"input": text, "max_output_tokens": 4, **fields}, **agent)
    assert answer.status_code == 200, answer.text
    return answer.json()


def files(home):
    return [path for path in (home / "store" / "responses").glob("*") if path.is_file()]


@pytest.mark.parametrize("key", ["", "a long enough secret"], ids=["plain", "sealed"])
def test_stored_response_and_its_items_can_be_continued_after_a_restart(serving, tmp_path, key):
    with serving(home=tmp_path, encryption_key=key) as live:
        first = ask(live, "Who is the quick brown fox?", headers=TO_OPS)
    (file,) = files(tmp_path)
    assert (b"quick" in file.read_bytes()) == (not key)
    assert ("ops" in file.name) == (not key)
    with serving(home=tmp_path, encryption_key=key) as live:
        again = live.get(f"/v1/responses/{first['id']}")
        assert again.json() == first
        listed = live.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
        assert listed[0]["content"][0]["text"] == "Who is the quick brown fox?"
        second = ask(live, "Why?", previous_response_id=first["id"])
        known = first["usage"]["input_tokens"]
        assert second["usage"]["input_tokens"] > known
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > known
        assert live.get("/v1/responses/../../etc").status_code == 404
        items = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        question = {"role": "user", "content": "Who is the quick brown fox?"}
        follow_up = [question, *items, {"role": "user", "content": "Why?"}]
        by_reference = ask(live, follow_up)
        assert by_reference["usage"]["input_tokens"] == second["usage"]["input_tokens"]


def test_deleting_an_agent_deletes_its_responses(serving, tmp_path):
    with serving(home=tmp_path, admin_key="root") as live:
        of_agent, other = ask(live, "Who?", headers=TO_OPS), ask(live, "Who?")
        wait_until(lambda: len(files(tmp_path)) == 2)
        store = live.host.engine.store
        live.host.engine.wait_until_saved()
        store.on_disk.agents.delete("ops")  # as another process does
        wait_until(lambda: len(files(tmp_path)) == 1)
        assert live.get(f"/v1/responses/{of_agent['id']}").status_code == 404
        assert live.get(f"/v1/responses/{other['id']}").status_code == 200

        again = ask(live, "Who?", headers=TO_OPS)
        assert live.get(f"/v1/responses/{again['id']}").status_code == 200
        live.host.engine.wait_until_saved()  # recorded in the background
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


def test_response_that_may_not_be_on_disk_is_in_memory_only(serving, tmp_path):
    with serving(home=tmp_path) as live:
        kept = ask(live, "Who?", headers={"X-Keepwarm-Cache": "ephemeral"})
        assert live.get(f"/v1/responses/{kept['id']}").status_code == 200
        ask(live, "Who?", store=False)
    assert not files(tmp_path)
    with serving(home=tmp_path, response_ttl_s=0) as live:
        kept = ask(live, "Who?")
        assert live.get(f"/v1/responses/{kept['id']}").status_code == 200
    assert not files(tmp_path)


def test_response_of_an_ephemeral_fork_is_in_memory_only(serving, tmp_path):
    with serving(home=tmp_path) as live:
        ask(live, "Who?", store=False, headers=TO_OPS)
        live.host.engine.wait_until_saved()
        fork = {"id": "copy", "ephemeral": True}
        assert live.post("/v1/agents/ops/fork", fork).status_code == 200
        kept = ask(live, "Who?", headers={"X-Keepwarm-Agent": "copy"})
        assert live.get(f"/v1/responses/{kept['id']}").status_code == 200
    assert not files(tmp_path)


@pytest.fixture
def texts(tmp_path):
    disk = DiskTier(tmp_path)
    yield AgentTexts(disk, max_bytes=20_000)
    disk.close()


def test_agent_texts_over_their_limit_lose_the_oldest_first(texts, tmp_path):
    for number in range(5):
        texts.put("ops", f"/text {number}", b"x" * 6000, DAY_S)
        path = texts.path_of("ops", f"/text {number}")
        os.utime(path, (0, time.time() - 100 + number))
    foreign = tmp_path / "responses" / "notes.txt"
    foreign.write_text("mine")
    texts.put("", "/last", b"x" * 6000, DAY_S)
    found = [bool(texts.get(f"/text {number}", DAY_S)) for number in range(5)]
    assert found == [False, False, False, True, True]
    assert texts.get("/text 4", ttl_s=10) is None  # too old
    texts.put("", "/later", b"x", ttl_s=10)
    assert not texts.path_of("ops", "/text 4").exists()
    assert texts.get("/last", DAY_S)
    assert foreign.exists()


def test_agent_texts_over_their_limit_are_those_of_the_owner_with_most(texts):
    texts.put("", "mine/first", b"x" * 6000, DAY_S)
    os.utime(texts.path_of("", "mine/first"), (0, time.time() - 100))
    for number in range(9):
        texts.put("", f"other/{number}", b"x" * 6000, DAY_S)
    assert texts.get("mine/first", DAY_S)
    assert [number for number in range(9) if texts.get(f"other/{number}", DAY_S)] == [7, 8]


def test_name_of_a_text_is_neither_pattern_nor_path(texts):
    texts.put("ops", "one", b"1", DAY_S)
    for name in ("*", "../one", "one\0", "\udcff"):
        assert texts.get(name, DAY_S) is None
    texts.remove("*")
    texts.remove_agent("op")
    assert texts.get("one", DAY_S) == b"1"


def test_response_whose_file_is_damaged_is_not_found(texts, tmp_path):
    path = texts.path_of("ops", "/resp_1")
    with Store(tmp_path) as store, response_store(store) as responses:
        put(responses, "resp_1", agent="ops")
        assert asyncio.run(has(responses, "", "resp_1"))  # written
        for damage in (b"", b"{", b"[]", b'{"version": 1}', b'{"version": 2}'):
            path.write_bytes(damage)
            with pytest.raises(UnknownResponse):
                asyncio.run(responses.get("", "resp_1"))


@contextmanager
def response_store(store, **options):
    made = ResponseStore(lambda: store, **{"ttl_s": DAY_S, **options})
    yield made
    made.close()


def put(responses, name, items=ITEMS, n_input=1, tenant="", *, size=0, logprobs=(), **options):
    """Store a response with this id and one message of this size."""
    part = {"type": "output_text", "text": "x" * size, "logprobs": list(logprobs)}
    message = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]}
    response = {"id": name, "created_at": int(time.time()), "output": [message]}
    since = options.pop("since", responses.generation())
    responses.put(tenant, response, items, n_input, since=since, **options)


IN_MEMORY_AND_ON_DISK = pytest.mark.parametrize("to_disk", [False, True], ids=["memory", "disk"])


@IN_MEMORY_AND_ON_DISK
def test_stored_response_has_the_whole_conversation_and_goes_alone(tmp_path, to_disk):
    async def check(responses):
        put(responses, "a", size=10, to_disk=to_disk)
        first = await responses.get("", "a")
        later = [*first.items, Item(role="user", content="Why?")]
        put(responses, "b", later, size=3, to_disk=to_disk)
        await responses.delete("", "a")
        second = await responses.get("", "b")
        said = [item.content for item in second.items]
        texts = [each if isinstance(each, str) else each[0].text for each in said]
        assert texts == ["Hi", "x" * 10, "Why?", "x" * 3]
        assert [item.content for item in second.input] == ["Why?"]
        for touch in (responses.get, responses.delete):
            with pytest.raises(UnknownResponse, match="id 'a' not found"):
                await touch("", "a")
            with pytest.raises(UnknownResponse):
                await touch("other", "b")

    with Store(tmp_path) as store, response_store(store) as responses:
        asyncio.run(check(responses))


@IN_MEMORY_AND_ON_DISK
def test_log_probabilities_are_made_into_json_once(tmp_path, to_disk):
    """They are megabytes, and a stream of a stored response has them five times."""
    logprobs = [{"token": '"\n', "logprob": -0.25, "top_logprobs": []}] * 1000

    async def check(responses):
        put(responses, "a", logprobs=logprobs, to_disk=to_disk)
        found = await responses.get("", "a")
        shown = to_json(found.response)
        assert len(shown) < 500
        (message,) = json.loads(found.filled(shown))["output"]
        assert message["content"][0]["logprobs"] == logprobs

    with Store(tmp_path) as store, response_store(store) as responses:
        asyncio.run(check(responses))


def test_responses_in_memory_evict_the_least_recently_used(tmp_path):
    async def check(responses):
        for name in "abcdefgh":
            put(responses, name, size=10_000, to_disk=False)
            await responses.get("", "a")  # still in use
        assert 30_000 < responses.n_bytes <= 40_960
        assert [name for name in "abcdefgh" if await has(responses, "", name)] == list("agh")
        put(responses, "large", size=50_000, to_disk=False)
        assert not await has(responses, "", "large")
        assert responses.n_bytes == 0

    with Store(tmp_path) as store, response_store(store, max_bytes=40_960) as responses:
        asyncio.run(check(responses))


def test_responses_of_a_tenant_in_memory_are_not_evicted_for_those_of_another(tmp_path):
    async def check(responses):
        put(responses, "first", tenant="mine", size=10_000, to_disk=False)
        for name in "abcdefgh":
            put(responses, name, tenant="other", size=10_000, to_disk=False)
        assert await has(responses, "mine", "first")
        assert [name for name in "abcdefgh" if await has(responses, "other", name)] == list("gh")
        put(responses, "large", tenant="other", size=50_000, to_disk=False)
        assert await has(responses, "mine", "first")
        assert not await has(responses, "other", "large")

    with Store(tmp_path) as store, response_store(store, max_bytes=40_960) as responses:
        asyncio.run(check(responses))


def test_response_that_is_put_and_read_twice_is_counted_once(tmp_path):
    """Two forks of one response read it at once after a restart; then both store the same id."""

    async def check(responses):
        for _ in range(80):
            put(responses, "a", size=1000, to_disk=False)
            put(responses, "b", size=1000, to_disk=False)
            await asyncio.gather(*(responses.get("", "a") for _ in range(4)))
        assert await has(responses, "", "b")
        n_bytes = responses.n_bytes
        assert 2000 < n_bytes < 4000
        await responses.delete("", "a")
        assert responses.n_bytes == n_bytes // 2

    with Store(tmp_path) as store, response_store(store, max_bytes=8000) as responses:
        asyncio.run(check(responses))


@pytest.mark.parametrize("where", ["id", "name", "unknown", "content"])
def test_memory_of_responses_counts_every_byte_that_a_client_sent(tmp_path, where):
    with Store(tmp_path) as store, response_store(store) as responses:
        put(responses, "a", [Item(role="user", **{where: "x" * 9000})], to_disk=False)
        asyncio.run(has(responses, "", "a"))
        assert responses.n_bytes > 9000 + ENTRY_BYTES


def test_response_is_in_memory_if_the_disk_refuses_it(tmp_path, monkeypatch):
    with Store(tmp_path) as store, response_store(store) as responses:
        monkeypatch.setattr(store.on_disk.agents.responses, "put", lambda *_: 1 / 0)
        put(responses, "a")
        assert asyncio.run(has(responses, "", "a"))
        assert responses.n_bytes > 0


@IN_MEMORY_AND_ON_DISK
def test_responses_of_a_deleted_agent_are_gone_and_stay_gone(tmp_path, to_disk):
    """Deleted by another process; also if its request ends only then, written or not."""

    async def check(responses):
        since = responses.generation()
        put(responses, "resp_1", since=since, agent="ops", to_disk=to_disk)
        assert await has(responses, "", "resp_1")
        await asyncio.to_thread(other.agents.delete, "ops")
        responses.generation()  # the writer's thread asks, too, every half second
        put(responses, "resp_2", since=since, agent="ops", to_disk=to_disk)
        for name in ("resp_1", "resp_2"):
            assert not await has(responses, "", name)
        assert responses.n_bytes == 0

    with Store(tmp_path) as store, AgentStore(tmp_path) as other:
        other.agents.create("ops", Branch(Namespace(b"n" * 32)))
        with response_store(store) as responses:
            asyncio.run(check(responses))


def test_response_that_is_written_after_its_agent_was_deleted_is_removed(tmp_path, monkeypatch):
    """Its agent is deleted, with its files, between the answer and the write."""
    with Store(tmp_path) as store, AgentStore(tmp_path) as other:
        other.agents.create("ops", Branch(Namespace(b"n" * 32)))
        texts = store.on_disk.agents.responses
        write = texts.put

        def delete_first(*arguments):
            other.agents.delete("ops")
            write(*arguments)

        monkeypatch.setattr(texts, "put", delete_first)
        with response_store(store) as responses:
            put(responses, "resp_1", agent="ops")
        assert list((tmp_path / "responses").glob("*")) == []


def test_item_id_names_its_response():
    response_id = f"resp_{'0a' * 12}"
    assert response_of_item(item_id("msg_", response_id, 3)) == response_id
    for foreign in ("", "msg_gone", "msg_1", response_id, f"msg_{'0a' * 14}\n"):
        assert response_of_item(foreign) is None
