"""A bundle is a stranger's data: rows changed, digests recomputed, and everything looks right.

What it says may be served to the agent that was imported and to its forks, and to nobody else.
"""

import io
import tarfile

import httpx
import numpy as np
import pytest

from keepwarm import config
from keepwarm.models.load import load
from keepwarm.store.record import Record, encode_record, open_record, read_record
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import Live, serve

LONG = "The quick brown fox jumps over the lazy dog. " * 40
KEYS = {"api_keys": "a,b", "share_cache": True}
A, B = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}


def edited(bundle, change):
    """The bundle with every record changed and every digest computed again."""
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(bundle)) as old, tarfile.open(None, "w", made) as new:
        for member in old:
            file = io.BytesIO(old.extractfile(member).read())
            data = file.getvalue()
            if member.name != "manifest.json":
                record = change(read_record(file, open_record(file, len(data))))
                data = b"".join(encode_record(record))
            info = tarfile.TarInfo(member.name)
            info.size = len(data)
            new.addfile(info, io.BytesIO(data))
    return made.getvalue()


def poisoned(record):
    """Other keys and values, of the same shape: the model answers something else from them."""
    return Record(record.header, tuple(map(negative, record.tensors)))


def negative(tensor):
    assert tensor.dtype == "F32"
    return tensor._replace(data=memoryview((-np.frombuffer(tensor.data, np.float32)).tobytes()))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("model"), n_context=16384)
    return load(str(path), config.load({}, home=None))


@pytest.fixture(scope="module")
def serving(model, tmp_path_factory):
    def start(home=None, **values):
        home = home or tmp_path_factory.mktemp("home")
        return serve(model, config.load({"KEEPWARM_HOME": str(home)}, **values))

    return start


def ask(live: Live, agent=None, text=LONG, more=(), **headers):
    """One turn, recorded when this returns: its text, its receipt, and the conversation after."""
    messages = [{"role": "user", "content": text}, *more]
    headers |= {"X-Keepwarm-Cache": "durable"} | ({"X-Keepwarm-Agent": agent} if agent else {})
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    answer = live.post("/v1/chat/completions", body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["keepwarm"]


def upload(live: Live, bundle, agent, **headers):
    url = f"{live.url}/v1/agents/import"
    return httpx.post(url, params={"id": agent}, content=bundle, headers=headers, timeout=300)


@pytest.fixture(scope="module")
def honest(serving):
    """A bundle as it is exported, and the answer that follows from it."""
    with serving() as live:
        text, _ = ask(live, "author")
        return live.get("/v1/agents/author/export").content, text


@pytest.fixture(scope="module")
def forged(honest):
    return edited(honest[0], poisoned)


@pytest.mark.parametrize("settings", [{}, KEYS], ids=["no keys", "keys that share"])
def test_a_forged_bundle_serves_its_own_agent_only(serving, honest, forged, settings, tmp_path):
    _, cold = honest
    with serving(tmp_path, **settings) as live:
        assert upload(live, forged, "stranger", **A).status_code == 200
        text, receipt = ask(live, **B)
        assert (text, receipt["reused"], receipt["exact"]) == (cold, {}, True)
        wrong, receipt = ask(live, "stranger", **A)
        assert wrong != cold, "the forged rows must matter, or this proves nothing"
        assert receipt["reused"]["disk"] == receipt["prompt_tokens"] - 1
        assert (receipt["exact"], receipt["inexact"]) == (False, ["imported"])


def variants(text):
    """Prompts that begin like the forged one: all of it, another end, a part of its last block."""
    return {"same": text, "longer": f"{text} And then?", "shorter": text[: len(text) // 2]}


@pytest.fixture(scope="module")
def cold(serving):
    """What each variant is answered where no bundle was ever imported."""
    with serving() as live:
        return {name: ask(live, text=text)[0] for name, text in variants(LONG).items()}


def assert_clean(live, cold, *agents):
    """Whoever is not the imported agent gets the answers of a cold run."""
    for name, text in variants(LONG).items():
        for agent in (None, *agents):
            said, receipt = ask(live, agent, text)
            assert (said, receipt["exact"]) == (cold[name], True), (name, agent)
            assert "inexact" not in receipt


def assert_marked(live, agent, *more):
    said, receipt = ask(live, agent, more=more)
    assert receipt["reused"], f"{agent} is served from what was imported"
    assert receipt["inexact"] == ["imported"]
    assert live.get(f"/v1/agents/{agent}").json()["imported"] is True
    return said


def test_the_mark_stays_with_the_agent_and_goes_to_nobody_else(serving, forged, cold, tmp_path):
    """Live caches, memory, forks, turns on top, rewinds, exports, a restart without an index."""
    with serving(tmp_path) as live:
        assert upload(live, forged, "stranger").json()["imported"] is True
        said = assert_marked(live, "stranger")
        assert said != cold["same"], "the forged rows must matter, or this proves nothing"
        turn = [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        assert_marked(live, "stranger", *turn)
        assert live.post("/v1/agents/stranger/fork", {"id": "fork"}).json()["imported"] is True
        assert live.post("/v1/agents/fork/rewind", {"turn": 1}).json()["imported"] is True
        assert assert_marked(live, "fork") == said
        carried = live.get("/v1/agents/fork/export").content
        assert upload(live, carried, "carried").status_code == 200
        assert assert_marked(live, "carried") == said
        assert_clean(live, cold, "another")
    (tmp_path / "store" / "index.sqlite").unlink()
    with serving(tmp_path) as live:
        for agent in ("stranger", "fork", "carried"):
            assert assert_marked(live, agent) == said
        assert_clean(live, cold, "another")
