"""One key's agents, pins and lists leave another key its disk and its threads."""

import asyncio
import time
from collections import Counter
from contextlib import contextmanager

import httpx
import pytest
from starlette.responses import Response

from keepwarm import config
from keepwarm.agents.agent import Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.reachability import UNPROTECTED, Protection
from keepwarm.agents.shares import RECOUNT_S, AgentLimits, AgentShares, TtlPins
from keepwarm.errors import BadInput, Busy
from keepwarm.models.load import load
from keepwarm.prefix.blocks import chain
from keepwarm.prefix.fingerprint import Identity, namespace
from keepwarm.server.http.keys import ApiKeys
from keepwarm.server.http.limits import Limits
from keepwarm.server.http.permits import (
    MANAGEMENT_OF_ONE_KEY,
    MANAGEMENT_THREADS,
    PrepareLimiter,
    prepare_threads,
)
from keepwarm.server.http.problems import REFUSAL_S, ProblemResponse, problem_of
from keepwarm.store.disk.disk import DiskLimits
from tests.contract.test_tiers import Minutes
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import serve
from tests.store.kit import record, tokens_of

IDENTITY = Identity(weights={"model": "1"}, config="2", tokenizer="3", layout="4")
NAME = namespace(IDENTITY)
N_BYTES = 64 << 10  # of a record
N_BLOCKS = 100  # that fit into the store
MINE, THEIRS = "a" * 16, "b" * 16  # tenants
KEYS = {"api_keys": "attacker,victim"}
ATTACKER, VICTIM = ({"Authorization": f"Bearer {name}"} for name in ("attacker", "victim"))


@contextmanager
def store_of(path, clock=None):
    """A store of two keys, with a share of 25 blocks each."""
    size = DiskLimits(max_bytes=N_BLOCKS * (N_BYTES + 1024) + (1 << 20), min_free_bytes=0)
    with AgentStore(path / "store", size) as opened:
        opened.register(IDENTITY)
        opened.disk._clock = clock or Minutes()
        opened.limit(AgentLimits(10, 25 * (N_BYTES + 1024), has_tenants=True))
        yield opened


@pytest.fixture
def store(tmp_path):
    with store_of(tmp_path) as opened:
        yield opened


def put(store, tokens):
    """How many of the blocks of a conversation are on disk afterwards."""
    refs = list(chain(NAME, tokens))
    for ref in refs:
        store.disk.put(record(ref, n_bytes=N_BYTES, namespace=NAME)).durable.result()
    return len(store.disk.have([ref.key for ref in refs]))


def talk(store, agent_id, n_blocks, first):
    """A conversation that grows by a block each turn."""
    tokens = [token + 1000 * first for token in tokens_of(256 * n_blocks)]
    for end in range(256, len(tokens) + 1, 256):
        put(store, tokens[:end])
        store.agents.advance(agent_id, NAME, tokens[:end])
    return tokens


def test_pins_of_one_key_that_grow_leave_the_store_to_others(store):
    """Empty agents are pinned, which costs nothing, and grow then."""
    for number in range(6):
        store.agents.create(f"{MINE}.{number}", Branch(NAME), pinned=True)
        talk(store, f"{MINE}.{number}", 20, first=number)
    theirs = [token + 10**6 for token in tokens_of(256 * 40)]
    assert put(store, theirs) == 40
    assert store.disk.have(store.agents.show(f"{MINE}.0").blocks[:5])  # within the share


def test_pins_that_grow_leave_the_store_to_others_after_a_restart(tmp_path):
    clock = Minutes()
    with store_of(tmp_path, clock) as store:
        for number in range(6):
            store.agents.create(f"{MINE}.{number}", Branch(NAME), pinned=True)
            talk(store, f"{MINE}.{number}", 10, first=number)
    with store_of(tmp_path, clock) as store:
        for number in range(6):
            talk(store, f"{MINE}.{number}", 12, first=number)
        assert put(store, [token + 10**6 for token in tokens_of(256 * 40)]) == 40


def test_a_pin_beyond_the_share_is_refused_with_the_numbers_and_others_stay(store):
    for number in range(2):
        talk(store, f"{MINE}.{number}", 20, first=number)
    first = store.agents.pin(f"{MINE}.0")
    with pytest.raises(BadInput, match=r"at most 1\.6 MiB, of which .* are left, and this takes"):
        store.agents.pin(f"{MINE}.1")
    assert store.agents.show(f"{MINE}.0") == first
    assert not store.agents.show(f"{MINE}.1").pinned
    store.agents.update(f"{MINE}.0", metadata={"a": "b"})  # is no new pin
    talk(store, f"{THEIRS}.0", 20, first=7)
    assert store.agents.pin(f"{THEIRS}.0").pinned  # another key's share is its own
    store.agents.pin(f"{MINE}.0", pinned=False)
    assert store.agents.pin(f"{MINE}.1").pinned


def test_a_quota_beyond_the_share_is_refused(store):
    with pytest.raises(BadInput, match="at most"):
        store.agents.create(f"{MINE}.a", Branch(NAME), quota_bytes=1 << 60)
    store.agents.create(f"{MINE}.a", Branch(NAME), quota_bytes=N_BYTES)
    with pytest.raises(BadInput, match="at most"):
        store.agents.update(f"{MINE}.a", quota_bytes=1 << 60)
    assert store.agents.show(f"{MINE}.a").quota_bytes == N_BYTES


def test_quotas_of_forks_leave_the_store_to_others(store):
    """They share all blocks at first, and none in the end."""
    quota = 20 * (N_BYTES + 1024)
    talk(store, f"{MINE}.0", 20, first=0)
    store.agents.update(f"{MINE}.0", quota_bytes=quota)
    for number in range(1, 5):
        store.agents.fork(f"{MINE}.0", f"{MINE}.{number}")
        with pytest.raises(BadInput, match="at most"):
            store.agents.update(f"{MINE}.{number}", quota_bytes=quota)
        store.agents.rewind(f"{MINE}.{number}", 0)
        talk(store, f"{MINE}.{number}", 20, first=number)
    assert put(store, [token + 10**6 for token in tokens_of(256 * 40)]) == 40


def test_a_pin_that_costs_nothing_cannot_become_a_quota(store):
    one, fork = f"{MINE}.one", f"{MINE}.fork"
    talk(store, one, 20, first=0)
    store.agents.pin(one)
    store.agents.fork(one, fork)
    store.agents.pin(fork)
    with pytest.raises(BadInput, match="at most"):
        store.agents.update(fork, pinned=False, quota_bytes=20 * N_BYTES)


def test_a_quota_leaves_less_room_for_a_pinned_branch(store):
    agent = f"{MINE}.0"
    talk(store, agent, 15, first=0)
    store.agents.update(agent, quota_bytes=15 * (N_BYTES + 1024))
    with pytest.raises(BadInput, match="at most"):
        store.agents.pin(agent, branch=store.agents.show(agent).head.number)


def test_a_block_that_grows_counts_as_what_it_is():
    shares = AgentShares(AgentLimits(9, 100, has_tenants=True), dict, lambda: 0.0)
    shares.room("a.1")  # counts
    shares.note("a.1", Protection([], {b"k": 10}))
    shares.note("a.2", Protection([], {b"k": 60}))
    assert shares.room("a.3").n_bytes == 40
    shares.note("a.1", Protection([], {b"k": 70}))
    assert shares.room("a.3").n_bytes == 30
    for gone in ("a.1", "a.2"):
        shares.drop(gone)
    assert shares.room("a.3").n_bytes == 100


def test_pins_that_are_there_stay_when_the_share_shrinks(store):
    tokens = talk(store, f"{MINE}.0", 20, first=0)
    store.agents.pin(f"{MINE}.0")
    store.limit(AgentLimits(10, 5 * N_BYTES, has_tenants=True))
    more = [*tokens, *tokens_of(256)]
    put(store, more)
    store.agents.advance(f"{MINE}.0", NAME, more)
    for number in range(4):
        put(store, [token + 10**6 * (1 + number) for token in tokens_of(256 * 40)])
    kept = store.disk.have(store.agents.show(f"{MINE}.0").blocks[:20])
    assert len(kept) == 20


def test_pins_that_are_there_stay_when_the_block_at_their_end_grows(store):
    tokens = tokens_of(256 * 20 + 100)
    put(store, tokens)
    store.agents.advance(f"{MINE}.0", NAME, tokens)
    store.agents.pin(f"{MINE}.0")
    store.limit(AgentLimits(10, 5 * N_BYTES, has_tenants=True))
    for n_more in (60, 90):
        more = [*tokens, *tokens_of(n_more)]
        put(store, more)
        store.disk.delete_superseded(list(chain(NAME, more))[-1].key)
        store.agents.advance(f"{MINE}.0", NAME, more)
    for number in range(4):
        put(store, [token + 10**6 * (1 + number) for token in tokens_of(256 * 40)])
    assert len(store.disk.have(store.agents.show(f"{MINE}.0").blocks[:20])) == 20


def test_a_block_that_forks_share_counts_once(store):
    """What one of them adds counts, and what is left when another goes."""
    one, fork, other = (f"{MINE}.{name}" for name in ("one", "fork", "other"))
    tokens = talk(store, one, 20, first=1)
    talk(store, other, 4, first=5)
    store.agents.pin(one)
    store.agents.fork(one, fork)
    store.agents.pin(fork)
    longer = [*tokens, *tokens_of(256 * 10)]
    put(store, longer)
    grown = store.agents.advance(fork, NAME, longer)
    kept = store.disk.index.lookups.pinned_by(f"agent:{fork}")
    assert [grown.blocks.index(key) for key in kept] == [23]  # of the 10 new ones four
    for gone in (one, None):
        if gone:
            store.agents.delete(gone)
        with pytest.raises(BadInput, match="are left"):
            store.agents.pin(other)
    store.agents.delete(fork)
    assert store.agents.pin(other).pinned


def test_ephemeral_agents_that_were_deleted_with_all_count_no_longer(store):
    talk(store, f"{MINE}.0", 1, first=0)
    store.agents.fork_all(f"{MINE}.0", [f"{MINE}.{n}" for n in range(1, 10)], ephemeral=True)
    with pytest.raises(BadInput, match="has 10 agents"):
        store.agents.create(f"{MINE}.more", Branch(NAME))
    store.clear()
    for number in range(10):
        assert store.agents.create(f"{MINE}.{number}", Branch(NAME))


def test_ttl_pins_of_deleted_blocks_make_room(store):
    for number in range(2):
        tokens = [token + 1000 * number for token in tokens_of(256 * 20)]
        put(store, tokens)
        store.ttl_pins.pin(NAME, tokens, len(tokens), 3600, MINE)
        last = list(chain(NAME, tokens))[-1].key
        assert store.disk.index.lookups.owners(last)
        store.clear()


def test_ttl_pins_of_one_key_leave_the_store_to_others(store):
    mine = tokens_of(256 * 20)
    for number in range(4):
        tokens = [token + 1000 * number for token in mine]
        put(store, tokens)
        store.ttl_pins.pin(NAME, tokens, len(tokens), 3600, MINE)
    assert put(store, [token + 10**6 for token in tokens_of(256 * 40)]) == 40
    tokens = [token + 2 * 10**6 for token in mine]
    put(store, tokens)
    store.ttl_pins.pin(NAME, tokens, len(tokens), 3600, THEIRS)
    assert store.disk.index.lookups.owners(list(chain(NAME, tokens))[-1].key)


def test_ttl_pins_that_have_ended_make_room(store):
    now = [1000.0]
    pins = TtlPins(store.disk, lambda: now[0])
    pins.max_bytes = 25 * (N_BYTES + 1024)
    for number in range(3):
        tokens = [token + 1000 * number for token in tokens_of(256 * 20)]
        put(store, tokens)
        pins.pin(NAME, tokens, len(tokens), 60, MINE)
        last = list(chain(NAME, tokens))[-1].key
        assert bool(store.disk.index.lookups.owners(last)) == (number != 1)
        now[0] += 61 * (number == 1)


def test_a_key_may_have_so_many_agents(store):
    for number in range(10):
        store.agents.create(f"{MINE}.{number}", Branch(NAME))
    for make in (
        lambda: store.agents.create(f"{MINE}.more", Branch(NAME)),
        lambda: store.agents.fork(f"{MINE}.0", f"{MINE}.more"),
    ):
        with pytest.raises(BadInput, match="has 10 agents and may have 10"):
            make()
    assert store.agents.advance(f"{MINE}.more", NAME, tokens_of(300)) is None
    assert store.agents.create(f"{THEIRS}.0", Branch(NAME))
    store.agents.delete(f"{MINE}.0")
    assert store.agents.advance(f"{MINE}.more", NAME, tokens_of(300))


def test_agents_that_another_process_deletes_are_counted_no_longer():
    there, now = {"a.1": Protection([], {b"k": 5}), "a.2": UNPROTECTED}, [0.0]
    shares = AgentShares(AgentLimits(2, 10, has_tenants=True), lambda: there, lambda: now[0])
    assert (shares.has_room("a.3"), shares.room("a.3").n_bytes) == (False, 5)
    del there["a.1"]
    now[0] += RECOUNT_S
    assert (shares.has_room("a.3"), shares.room("a.3").n_bytes) == (True, 10)


def test_half_of_the_store_is_shared_by_the_keys(tmp_path):
    def limits(**values):
        return AgentLimits.of(config.load({"KEEPWARM_HOME": str(tmp_path)}, **values))

    size = {"disk_bytes": 8 << 30}
    assert limits(api_keys="a,b", **size).n_bytes == 2 << 30
    assert limits(api_keys="a,b", share_cache=True, **size).n_bytes == 4 << 30
    assert limits(api_keys="a,b", admin_key="c", **size).n_bytes == (4 << 30) // 3
    assert limits(api_keys="a,b", admin_key="a", **size).n_bytes == 2 << 30
    assert limits(**size) == AgentLimits()  # without keys there is nobody else
    assert limits(api_keys="a,b", max_agents=7).n_agents == 7
    named = tmp_path / "keys"
    named.write_text("one = x\none = y\ntwo = z\n")
    named.chmod(0o600)
    assert limits(api_keys=f"@{named}", **size).n_bytes == 2 << 30


# Through the server


def test_a_list_reads_only_the_agents_of_its_key_a_page_at_a_time(tmp_path):
    path = write_checkpoint(tmp_path / "model")
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, **KEYS)
    with serve(load(str(path), settings), settings) as live:
        for number in range(5):
            live.post("/v1/agents", {"id": f"n{number}"}, **ATTACKER).raise_for_status()
        live.post("/v1/agents", {"id": "mine"}, **VICTIM).raise_for_status()
        agents = live.host.engine.store.on_disk.agents
        (theirs,) = {each.id.partition(".")[0] for each in agents.all() if each.id[17] == "n"}
        for path in (tmp_path / "store" / "agents").glob(f"{theirs}.n[34].json"):
            path.write_text("{")  # would be in the log if it were read
        first = live.get("/v1/agents?limit=2", **ATTACKER).json()
        assert ([each["id"] for each in first["data"]], first["has_more"]) == (["n0", "n1"], True)
        last = live.get("/v1/agents?limit=2&after=n1", **ATTACKER).json()
        assert ([each["id"] for each in last["data"]], last["has_more"]) == (["n2"], False)
        listed = live.get("/v1/agents", **VICTIM).json()
        assert [each["id"] for each in listed["data"]] == ["mine"]
        assert live.get("/v1/agents?limit=1001", **VICTIM).status_code == 400


async def get(app, path, key):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path, headers={"Authorization": f"Bearer {key}"})


def behind_limits(app, tmp_path, threads, **values):
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, **KEYS, **values)
    return Limits(PrepareLimiter(app, settings, threads), settings, ApiKeys(settings))


def test_lists_of_one_key_leave_threads_to_another(tmp_path):
    """However many it sends; until its answers begin, as a stream's does before its end."""
    entered, begin, end = Counter(), asyncio.Event(), asyncio.Event()

    async def listing(scope, receive, send):
        name = scope["state"]["owner"]
        entered[name] += 1
        if scope["path"] == "/v1/slow":
            await begin.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/v1/slow":
            await end.wait()
        await send({"type": "http.response.body", "body": b""})

    async def scenario(app):
        n_asked = 2 * MANAGEMENT_THREADS
        asked = [asyncio.create_task(get(app, "/v1/slow", "attacker")) for _ in range(n_asked)]
        while entered.total() < MANAGEMENT_OF_ONE_KEY:
            await asyncio.sleep(0)
        assert (await get(app, "/v1/agents", "victim")).status_code == 200
        assert sorted(entered.values()) == [1, MANAGEMENT_OF_ONE_KEY]
        begin.set()
        while entered.total() < n_asked + 1:  # the streams that have begun hold nothing
            await asyncio.sleep(0)
        end.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}

    with prepare_threads() as threads:
        app = behind_limits(listing, tmp_path, threads)
        asyncio.run(asyncio.wait_for(scenario(app), 60))


@pytest.mark.parametrize("limit", [{"rate_per_minute": 3}, {"max_concurrency": 3}])
def test_lists_are_metered_by_key_and_leave_requests_for_tokens_alone(tmp_path, limit):
    released = asyncio.Event()

    async def answer(scope, receive, send):
        if scope["method"] == "GET" and scope["path"] == "/v1/agents":
            await released.wait()
        await Response()(scope, receive, send)

    async def scenario(app):
        asked = [asyncio.create_task(get(app, "/v1/agents", "attacker")) for _ in range(5)]
        while sum(task.done() for task in asked) < 2:
            await asyncio.sleep(0)
        assert (await get(app, "/v1/models", "victim")).status_code == 200
        assert (await get(app, "/health", "attacker")).status_code == 200
        assert (await get(app, "/metrics", "attacker")).status_code == 200
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked_for = await client.post("/v1/completions", json={}, headers=ATTACKER)
            assert asked_for.status_code == 200
        released.set()
        return sorted(done.status_code for done in await asyncio.gather(*asked))

    with prepare_threads() as threads:
        app = behind_limits(answer, tmp_path, threads, **limit)
        assert asyncio.run(asyncio.wait_for(scenario(app), 60)) == [200, 200, 200, 429, 429]


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/responses"), ("GET", "/v1/agents")])
def test_a_refusal_waits_and_holds_no_permit_meanwhile(tmp_path, method, path):
    """A client that tries again at once costs the event loop little."""
    n_asked, entered = 2 * MANAGEMENT_THREADS, 0

    async def refuse(scope, receive, send):
        nonlocal entered
        entered += 1
        await ProblemResponse(scope, problem_of(Busy("Too many.")))(scope, receive, send)

    async def post(client):
        began = time.monotonic()
        answer = await client.request(method, path, json={}, headers=ATTACKER)
        return answer.status_code, time.monotonic() - began >= REFUSAL_S

    async def scenario(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = [asyncio.create_task(post(client)) for _ in range(n_asked)]
            while entered < n_asked:
                await asyncio.sleep(0)
            assert sum(task.done() for task in asked) < n_asked / 2  # one after another otherwise
            assert set(await asyncio.gather(*asked)) == {(429, True)}

    with prepare_threads() as threads:
        app = behind_limits(refuse, tmp_path, threads)
        asyncio.run(asyncio.wait_for(scenario(app), 60))


def test_a_refused_request_leaves_the_room_for_its_body_at_once(tmp_path):
    async def hang(scope, receive, send):
        await asyncio.Event().wait()

    async def scenario(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = [
                asyncio.create_task(client.post("/v1/responses", content=b"{}", headers=ATTACKER))
                for _ in range(3)
            ]
            while app.held["requests"] < 1:
                await asyncio.sleep(0)
            for _ in range(100):  # the others are refused by now, and wait for their answer
                await asyncio.sleep(0)
            held = dict(app.held)
            for task in asked:
                task.cancel()
            return held, [task.done() for task in asked]

    with prepare_threads() as threads:
        app = behind_limits(hang, tmp_path, threads, max_concurrency=1)
        held, done = asyncio.run(asyncio.wait_for(scenario(app), 60))
    assert (held["requests"], held["body bytes"]) == (1, 2)
    assert not any(done)


def test_which_model_blocks_are_of_is_read_once(store):
    known = store.identity_of(NAME)
    for path in (store.disk.root / "models").iterdir():
        path.unlink()  # a list of thousands of agents would read it for each
    assert store.identity_of(NAME) == known
