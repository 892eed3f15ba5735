"""The dashboard's endpoints: their data, and which key sees it."""

import json
import uuid
from datetime import datetime, timedelta

import httpx
import pytest

from keepwarm.server.dashboard.routes import FILES, POLICY
from keepwarm.telemetry.ledger import minute_name
from tests.kit.waiting import wait_until

A, B = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
ADMIN = {"Authorization": "Bearer admin"}
SECRET = "The password of the vault is swordfish. "
LONG = "The quick brown fox jumps over the lazy dog. " * 40


def ask(live, text, agent="", **headers):
    """One answer, on disk by the time this returns."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    headers |= {"X-Keepwarm-Cache": "durable"} | ({"X-Keepwarm-Agent": agent} if agent else {})
    answer = live.post("/v1/chat/completions", body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["keepwarm"]


def show(live, what, **headers):
    answer = live.get(f"/v1/dashboard/{what}", **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def two(serving):
    """A server with two keys, an admin key, and one miss of each key."""
    with serving(api_keys="a,b", admin_key="admin") as live:
        for name, key in (("alice", A), ("bob", B)):
            ask(live, f"{name} at nine. {SECRET}{LONG}", name, **key)
            ask(live, f"{name} at ten. {SECRET}{LONG}", name, **key)
        yield live


# The page.


def test_the_page_needs_no_key_and_holds_no_data(two):
    """Static files are open to everyone; data needs a key."""
    for path in ("/dashboard", *(f"/dashboard/{file.name}" for file in FILES.iterdir())):
        answer = two.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
    moved = two.get("/", Accept="text/html,application/xhtml+xml")
    assert (moved.status_code, moved.headers["location"]) == (307, "/dashboard")
    paths = "now saved forest misses requests agents models connect settings"
    for what in paths.split():
        assert two.get(f"/v1/dashboard/{what}").status_code == 401


def test_a_file_is_compressed_and_sent_once(live):
    first = live.get("/dashboard/style.css", **{"Accept-Encoding": "gzip"})
    assert first.headers["Content-Encoding"] == "gzip"
    assert first.content == live.get("/dashboard/style.css", **{"Accept-Encoding": ""}).content
    again = live.get("/dashboard/style.css", **{"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_uses_no_other_host():
    """No other host, no inline script or style."""
    assert "unsafe" not in POLICY
    for file in FILES.iterdir():
        text = file.read_text().replace('"http://www.w3.org/2000/svg"', "")
        assert "http://" not in text, file.name
        assert "https://" not in text, file.name
        assert "innerHTML" not in text, file.name


def test_no_other_file_is_served(live):
    for path in ("/dashboard/app.py", "/dashboard/..%2fapp.py", "/dashboard/../app.py"):
        assert httpx.get(f"{live.url}{path}").status_code == 404


def test_another_name_for_this_machine_is_refused(live):
    assert live.get("/dashboard", Host="evil.example").status_code == 403


# Now.


def test_a_request_is_shown_with_its_receipt(live):
    agent = f"agent-{uuid.uuid4()}"
    receipt = ask(live, LONG + agent, agent)
    (entry,) = [one for one in show(live, "requests")["data"] if one["agent"] == agent]
    assert entry["receipt"] == receipt
    assert entry["state"] == "done"
    assert entry["answer_tokens"] > 0
    assert entry["ttft_ms"] > 0


def test_a_running_request_is_shown_and_then_is_not(live):
    agent = f"agent-{uuid.uuid4()}"
    with live.openai().chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "Hi."}],
        max_tokens=12000,
        stream=True,
        logit_bias={str(end): -100 for end in live.host.engine.model.tokenizer.eos_token_ids},
        extra_headers={"X-Keepwarm-Agent": agent},
    ) as stream:
        next(iter(stream))

        def running():
            return [one for one in show(live, "now")["running"] if one["agent"] == agent]

        wait_until(lambda: any(one["state"] == "decoding" for one in running()))
        before = running()[0]["answer_tokens"]
        wait_until(lambda: running()[0]["answer_tokens"] > before)
        assert running()[0]["receipt"]["prompt_tokens"] > 0
        assert running()[0]["ttft_ms"] > 0  # while it streams
        assert running()[0]["processed"] == running()[0]["prompt_tokens"]
    wait_until(lambda: not running())


def test_memory_by_budget(live):
    ask(live, LONG)
    memory = {use["budget"]: use for use in show(live, "now")["memory"]}
    assert list(memory) == ["live", "memory", "batch", "buffers"]
    assert 0 < memory["memory"]["n_bytes"] <= memory["memory"]["max_bytes"]
    assert 0 < memory["live"]["n_bytes"] <= memory["live"]["max_bytes"]
    assert memory["batch"]["max_bytes"] > 0


# Saved.


def test_savings_are_summed_by_tier_and_survive_a_restart(serving, tmp_path):
    """Hit rate by tier, tokens and seconds not recomputed, writes per day; today and in total."""
    with serving(home=tmp_path) as live:
        cold = ask(live, LONG)
        warm = ask(live, LONG)
        before = show(live, "saved")
        assert before["today"]["computed"] == cold["recomputed"] + warm["recomputed"]
        assert sum(before["today"]["reused"].values()) == sum(warm["reused"].values()) > 0
        assert before["today"]["saved_s"] == pytest.approx(warm["saved_ms"] / 1000, abs=0.001)
        assert before["total"] == before["today"]
        assert len(before["points"]) == 60
        assert over_time(before) == before["today"]["reused"] | {
            "computed": before["today"]["computed"]
        }
        assert before["disk"]["n_bytes"] > 0
        assert list(before["written_by_day"].values())[-1] > 0
        assert set(before["health"].values()) == {0}
        assert show(live, "now")["condition"] == {"level": "green", "reasons": []}
        busy = [point for point in before["points"] if point["generated"]]
        assert sum(point["finished"] for point in busy) == 2
        assert all(point["failed"] == point["cancelled"] == 0 for point in busy)
        assert all(0 < point["ttft_p50_ms"] <= point["ttft_p95_ms"] for point in busy)
        assert busy[0]["prefilled"] > 0
        assert 0 < before["ttft_p50_ms"] <= before["ttft_p95_ms"]
        check_revision(live)
    file = tmp_path / "history.json"
    text = file.read_text()
    for minute in json.loads(text)["timeline"]["minutes"]:
        earlier = datetime.fromisoformat(minute) - timedelta(minutes=10)
        text = text.replace(minute, minute_name(earlier.timestamp()))
    file.write_text(text)
    with serving(home=tmp_path) as live:
        after = show(live, "saved")
        assert after["ttft_p50_ms"] > 0
        assert show(live, "saved?since_start=true")["ttft_p50_ms"] is None
        for name in ("today", "total"):
            assert after[name]["computed"] > before[name]["computed"] > 0
            assert after[name]["saved_s"] >= before[name]["saved_s"] > 0
        spared = ask(live, LONG)
        again = show(live, "saved")
        assert over_time(again)["disk"] == again["total"]["reused"]["disk"]
        assert again["total"]["reused"]["disk"] >= spared["reused"]["disk"] > 0
        more = again["total"]["saved_s"] - after["total"]["saved_s"]
        assert more == pytest.approx(spared["saved_ms"] / 1000, abs=0.002)


def check_revision(live):
    """It changes only when something has: an idle page asks for nothing else."""
    live.host.engine.wait_until_saved()
    before = show(live, "now")["revision"]
    assert show(live, "now")["revision"] == before
    live.post("/v1/agents", {"id": "one"}).raise_for_status()
    made = show(live, "now")["revision"]
    assert made != before
    ask(live, "Another.")
    assert show(live, "now")["revision"] not in (before, made)


def over_time(saved):
    """The sum of all points, by source."""
    names = ("live", "memory", "disk", "computed")
    return {name: sum(point[name] for point in saved["points"]) for name in names}


@pytest.mark.parametrize(
    ("hours", "status"), [(1, 200), (24, 200), (0, 400), (25, 400), ("x", 400)]
)
def test_so_many_hours(live, hours, status):
    answer = live.get(f"/v1/dashboard/saved?hours={hours}")
    assert answer.status_code == status
    if status == 200:
        first, second, *_ = answer.json()["points"]
        assert second["at"] - first["at"] == 60 * hours


# The forest.


def test_agents_share_and_diverge(serving):
    """Shared runs, forks, tiers, pins."""
    with serving() as live:
        ask(live, LONG, "one")
        assert live.post("/v1/agents/one/fork", {"id": "two"}).status_code == 200
        ask(live, LONG + "And now something else. " + LONG, "three")
        assert live.patch("/v1/agents/one", {"pinned": True}).status_code == 200
        forest = show(live, "forest")
        names = [agent["id"] for agent in forest["agents"]]
        runs = forest["runs"]
        ends = {names[place]: run for run in runs for place in run["ends"]}
        assert sorted(names) == ["one", "three", "two"]
        assert runs[0]["parent"] is None
        assert {names[place] for place in runs[0]["agents"]} == {"one", "two", "three"}
        assert ends["one"] == ends["two"] != ends["three"]
        assert ends["one"]["pinned"]
        assert not ends["three"]["pinned"]
        assert all(run["disk"] for run in runs)
        assert sum(run["blocks"] for run in runs) == forest["blocks"] > 3


# Misses.


def test_a_miss_shows_the_change_as_text(live):
    """Where the prompt changed, the earlier text, and the cost."""
    mark = uuid.uuid4().hex[:6]
    ask(live, f"{mark} It is nine. {LONG}")
    receipt = ask(live, f"{mark} It is ten. {LONG}", "late")
    missed = show(live, "misses")["data"][0]
    assert (missed["agent"], missed["reason"]) == ("late", "changed")
    assert missed["restored"] <= missed["position"] < missed["prompt_tokens"]
    assert missed["wasted"] > 0.9 * receipt["recomputed"] - 16
    assert missed["seconds"] > 0
    text = missed["text"]
    assert mark in text["before"] + text["now"]
    assert "nine" in text["before"] + text["earlier"]
    assert "ten" in text["before"] + text["now"]


# Access.


def test_a_key_sees_its_own_alone(two):
    """Of other keys it sees only the number of blocks and running requests."""
    for own, other, key in (("alice", "bob", A), ("bob", "alice", B)):
        views = ("now", "forest", "misses", "requests", "agents")
        told = {what: show(two, what, **key) for what in views}
        assert [agent["id"] for agent in told["agents"]["data"]] == [own]
        assert told["now"]["condition"] is None
        assert {entry["agent"] for entry in told["requests"]["data"]} == {own}
        assert [agent["id"] for agent in told["forest"]["agents"]] == [own]
        assert told["forest"]["other_blocks"] > 0
        assert [missed["agent"] for missed in told["misses"]["data"]] == [own]
        assert other not in str(told)
        assert "swordfish" not in str(told["now"])
        assert two.get("/v1/agents", **key).json()["data"][0]["id"] == own


def test_text_is_for_its_owner_alone(two):
    """Not even an admin reads another's prompts."""
    (mine,), (others,) = (show(two, "misses", **key)["data"] for key in (A, B))
    assert "ten" in str(mine["text"])
    assert mine["number"] != others["number"]
    assert mine["stored"].endswith(".alice"), "as the command line names it"
    assert [missed["text"] for missed in show(two, "misses", **ADMIN)["data"]] == [None, None]
    quoting = ("forest", "misses", "requests", "agents")
    assert all("alice at nine." in str(show(two, view, **A)) for view in quoting)
    assert not any("at nine." in str(show(two, view, **ADMIN)) for view in quoting)


def test_a_title_is_read_again_only_when_the_agent_has_changed(serving, monkeypatch):
    with serving() as live:
        ask(live, "Mend the bicycle.", "bike")
        agents, reads = live.models.store.on_disk.agents, []
        show_agent = agents.show
        monkeypatch.setattr(agents, "show", lambda name: reads.append(name) or show_agent(name))
        shown = [show(live, "requests")["data"][0]["title"] for _ in range(3)]
        assert "bicycle" in shown[0]
        assert len(set(shown)) == len(reads) == 1
        live.patch("/v1/agents/bike", {"metadata": {"title": "Bicycle"}}).raise_for_status()
        assert show(live, "requests")["data"][0]["title"] == "Bicycle"
        live.models.ledger.forget_texts()
        reads.clear()
        assert show(live, "requests")["data"][0]["title"] == "Bicycle"
        assert reads == ["bike"], "what is deleted is in no memory"


def test_no_text_is_shown_where_keys_share_a_cache(serving):
    """A title that was given is no prompt."""
    with serving(api_keys="a,b", share_cache=True) as live:
        ask(live, SECRET, "alice", **A)
        told = [show(live, view, **B) for view in ("forest", "requests", "agents")]
        found = live.get("/v1/agents", **B).json()["data"]
        assert "swordfish" not in str([*told, found])
        assert [agent["title"] for agent in found] == [""]
        live.patch("/v1/agents/alice", {"metadata": {"title": "Vault"}}, **B)
        assert live.get("/v1/agents/alice", **B).json()["title"] == "Vault"


def test_an_admin_sees_whose_everything_is(two):
    forest, now = show(two, "forest", **ADMIN), show(two, "now", **ADMIN)
    assert forest["other_blocks"] == 0
    assert len({agent["key"] for agent in forest["agents"]}) == 2
    assert None not in {entry["key"] for entry in show(two, "requests", **ADMIN)["data"]}
    fields = ("key_needed", "keys", "admin", "texts", "sums")
    assert now["viewer"] == dict.fromkeys(fields, True)
    assert show(two, "now", **A)["viewer"]["admin"] is False
    listed = {agent["id"]: agent for agent in show(two, "agents", **ADMIN)["data"]}
    assert sorted(listed) == ["alice", "bob"]
    assert len({agent["key"] for agent in listed.values()} - {None}) == 2
    assert sorted(agent["id"] for agent in forest["agents"]) == ["alice", "bob"]
    assert {agent["key"] for agent in show(two, "agents", **A)["data"]} == {None}


COUNTED = (
    *("/v1/dashboard/saved", "/v1/dashboard/settings"),
    "/v1/cache",
)


def sums_of(live, **headers):
    """Which totals over all keys a key can see."""
    now = show(live, "now", **headers)
    told = {path: live.get(path, **headers).status_code == 200 for path in COUNTED}
    told["/metrics"] = "keepwarm_prompt_tokens_total" in live.get("/metrics", **headers).text
    counted = ("memory", "prefilled_tokens", "generated_tokens")
    return (
        told | {name: now[name] is not None for name in counted} | {"sums": now["viewer"]["sums"]}
    )


def test_what_is_counted_over_all_keys_is_for_the_admin(two):
    """Totals do not reveal to one key what another does."""
    assert set(sums_of(two, **A).values()) == {False}
    assert set(sums_of(two, **ADMIN).values()) == {True}
    for path in COUNTED:
        refused = two.get(path, **A)
        assert refused.status_code == 403
        assert "admin key" in refused.json()["error"]["message"]
    told = [line for line in two.get("/metrics", **A).text.splitlines() if line[0] != "#"]
    assert told == ["keepwarm_ready 1.0"]
