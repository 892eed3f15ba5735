"""A bundle is a stranger's data: rows changed, digests recomputed, and everything looks right.

What it says may be served to the agent that was imported and to its forks, and to nobody else.
"""

import io
import json
import tarfile

import httpx
import numpy as np
import pytest

from keepwarm import config
from keepwarm.agents.bundle import write_archive
from keepwarm.models.load import load
from keepwarm.prefix.fingerprint import digest
from keepwarm.records.record import Record, encode_record, open_record, read_record
from tests.agents.test_signing import write_keys
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import Live, serve

LONG = "The quick brown fox jumps over the lazy dog. " * 18
KEYS = {"api_keys": "a,b", "share_cache": True}
A, B = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}


def members(bundle):
    with tarfile.open(fileobj=io.BytesIO(bundle)) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}


def archive(entries):
    return b"".join(write_archive((name, [data]) for name, data in entries.items()))


def edited(bundle, change):
    """The bundle with every record changed and every digest computed again."""
    entries = members(bundle)
    for name, data in entries.items():
        if name != "manifest.json":
            file = io.BytesIO(data)
            record = change(read_record(file, open_record(file, len(data))))
            entries[name] = b"".join(encode_record(record))
    return archive(entries)


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
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answer = live.post("/v1/chat/completions", body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["keepwarm"]


def upload(live: Live, bundle, agent, **headers):
    url, params = f"{live.url}/v1/agents/import", {"id": agent}
    return httpx.post(url, params=params, content=bundle, headers=headers, timeout=300)


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


# Tensors that the model could not have made.


def tensors(change):
    return lambda record: Record(record.header, tuple(map(change, record.tensors)))


def one_head_more(tensor):
    batch, heads, rows, width = tensor.shape
    data = bytes(tensor.data) + bytes(tensor.n_bytes // heads)
    return tensor._replace(shape=(batch, heads + 1, rows, width), data=memoryview(data))


def transposed(tensor):
    batch, heads, rows, width = tensor.shape
    return tensor._replace(shape=(batch, rows, heads, width))


def with_another(record):
    more = record.tensors[0]._replace(name="L99_B0_K")
    return Record(record.header, (*record.tensors, more))


WRONG = {
    "a head more": (tensors(one_head_more), "the shape is"),
    "rows as heads": (tensors(transposed), "the shape is"),
    "another dtype": (tensors(lambda one: one._replace(dtype="I32")), "the dtype is"),
    "a tensor less": (lambda record: Record(record.header, record.tensors[1:]), "is missing"),
    "a tensor more": (with_another, "is not a tensor of this model"),
    "no tensors": (lambda record: Record(record.header, ()), "it has no tensors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_that_the_model_could_not_have_made_is_refused(name, live, honest):
    change, says = WRONG[name]
    refused = upload(live, edited(honest[0], change), "misfit")
    assert refused.status_code == 422
    assert "does not fit the model" in refused.json()["error"]["message"]
    assert says in refused.json()["error"]["message"]
    assert "misfit" not in listed(live)


@pytest.fixture(scope="module")
def live(serving):
    with serving() as server:
        yield server


def listed(live):
    return [agent["id"] for agent in live.get("/v1/agents").json()["data"]]


# Three ways to become ordinary: a trusted signature, the check of all blocks, an admin.


def assert_ordinary(live, agent, cold):
    """Prompts without a name are served from it, and their answers are exact."""
    assert live.get(f"/v1/agents/{agent}").json()["imported"] is False
    said, receipt = ask(live)
    assert (said, receipt["exact"]) == (cold, True)
    assert sum(receipt["reused"].values()) == receipt["prompt_tokens"] - 1


@pytest.fixture(scope="module")
def key_files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("keys")
    return write_keys(directory / "mine"), write_keys(directory / "other")


@pytest.fixture(scope="module")
def signed(serving, key_files):
    (private, _), _ = key_files
    with serving(signing_key_file=str(private)) as live:
        ask(live, "author")
        return live.get("/v1/agents/author/export").content


def test_a_trusted_signature_makes_it_ordinary(serving, signed, honest, key_files):
    (_, mine), (_, other) = key_files
    with serving(trusted_keys=f"{other}, {mine}") as live:
        assert upload(live, signed, "friend").status_code == 200
        assert_ordinary(live, "friend", honest[1])


def test_another_signature_does_not(serving, signed, honest, key_files):
    _, (_, other) = key_files
    with serving(trusted_keys=str(other)) as live:
        assert upload(live, signed, "stranger").json()["imported"] is True
        assert ask(live)[1]["reused"] == {}
        assert upload(live, honest[0], "nobody").json()["imported"] is True


def test_what_was_signed_cannot_be_changed(serving, signed, forged, key_files):
    """Neither its records, with digests to match, nor its manifest, nor both for another's."""
    (_, mine), _ = key_files
    with serving(trusted_keys=str(mine)) as live:
        refused = upload(live, edited(signed, poisoned), "changed")
        assert refused.status_code == 422
        assert "is not what was signed" in refused.json()["error"]["message"]
        refused = upload(live, with_manifest(signed, turns=[1]), "other-turns")
        assert "signature does not match" in refused.text
        assert upload(live, with_manifest(forged, like=signed), "borrowed").status_code == 422
        assert listed(live) == []


def with_manifest(bundle, like=None, **changes):
    """The bundle with another manifest, of the same digest as an honest one would have."""
    entries = members(bundle)
    fields = json.loads(members(like or bundle)["manifest.json"])
    fields = fields | changes
    fields.pop("digest")
    entries["manifest.json"] = json.dumps(fields | {"digest": digest(fields, 32)}).encode()
    return archive(entries)


def test_the_signature_of_who_imported_it_proves_nothing(serving, forged, key_files):
    """A server signs what it exports, and says that it did not compute it."""
    (private, public), _ = key_files
    with serving(signing_key_file=str(private), trusted_keys=str(public)) as live:
        upload(live, forged, "stranger")
        laundered = live.get("/v1/agents/stranger/export").content
        assert upload(live, laundered, "laundered").json()["imported"] is True
        assert ask(live)[1]["reused"] == {}
