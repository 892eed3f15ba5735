"""The same requests give the same tokens, records and receipts as the version before."""

import json
import shutil
from pathlib import Path

import pytest

from keepwarm.agents.agent_store import AgentStore
from keepwarm.cache.identity import identity_of
from keepwarm.store.disk.disk import DiskLimits
from keepwarm.store.disk.maintenance import verify
from tests.golden import scenario
from tests.golden.api import shapes
from tests.golden.scenario import (
    AGENT,
    DATA,
    NEXT,
    SECRET,
    SYSTEM,
    USER,
    answered,
    ask,
    engine_on,
    request,
)

# The end of the system prompt, where its second conversation parts from the first: its state is
# kept by now, and these records were written before.
LEARNED = {"qwen3_next": {"ffe3b496c84ad0061a7392b928862e1fb76b3186"}}

every_model = pytest.mark.parametrize("architecture", scenario.ARCHITECTURES)
STORES = [(a, "plain", "") for a in scenario.ARCHITECTURES] + [("llama", "sealed", SECRET)]


def expected(name):
    return json.loads((DATA / name).read_text())


def check_repeated(architecture, home, secret=""):
    """The prompt is answered from disk alone, but for the one token that a model must be fed."""
    answer = answer_on(architecture, home, request(SYSTEM, USER), secret)
    receipt = answer["receipt"]
    assert answer["tokens"] == expected(f"stores/{architecture}.json")["tokens"]
    assert receipt["reused"] == {"disk": receipt["prompt_tokens"] - 1}
    assert receipt["exact"]


def check_continued(architecture, home):
    """The next turn goes on behind the last answer, from disk, and says what it always said."""
    first = expected(f"stores/{architecture}.json")
    wanted = expected(f"{architecture}.json")["answers"]["second turn"]
    answer = answer_on(architecture, home, request(SYSTEM, USER, answered(first), NEXT))
    assert answer["tokens"] == wanted["tokens"]
    assert answer["receipt"]["reused"] == {"disk": wanted["receipt"]["reused"]["live"]}


def answer_on(architecture, home, wanted, secret=""):
    with engine_on(scenario.load(architecture), home, secret) as engine:
        return ask(engine, wanted)


def check_sound(disk_store):
    checked = list(verify(disk_store.disk))
    assert [record for record in checked if record.wrong or record.newer] == []
    return len(checked)


def corrected(answer):
    """Nothing is evicted here, but a divergence on a model with windows said so."""
    miss = answer["receipt"]["miss"]
    if miss is None or miss["reason"] != "evicted":
        return answer
    receipt = answer["receipt"] | {"miss": miss | {"reason": "diverged"}}
    return answer | {"receipt": receipt}


@every_model
def test_tokens_records_and_receipts(architecture, tmp_path):
    played, wanted = scenario.play(architecture, tmp_path), expected(f"{architecture}.json")
    for name, answer in wanted["answers"].items():
        assert played["answers"][name] == corrected(answer), name
    assert played["records"].items() >= wanted["records"].items()
    more = played["records"].keys() - wanted["records"].keys()
    assert {Path(name).name.split(".")[0] for name in more} == LEARNED.get(architecture, set())


@pytest.mark.parametrize(("architecture", "kind", "secret"), STORES)
def test_recorded_store_opens_and_is_restored(architecture, kind, secret, tmp_path):
    shutil.copytree(DATA / "stores" / f"{architecture}-{kind}", tmp_path / "store")
    n_files = len(list((tmp_path / "store").glob("blocks/*/*.safetensors")))
    with AgentStore(tmp_path / "store", DiskLimits(min_free_bytes=0), secret=secret) as disk_store:
        assert check_sound(disk_store) == n_files >= 2
        assert [agent.id for agent in disk_store.agents.all()] == [AGENT]
    check_repeated(architecture, tmp_path, secret)


@every_model
def test_a_bundle_of_the_version_before(architecture, tmp_path):
    with engine_on(scenario.load(architecture), tmp_path) as engine:
        disk_store = engine.store.on_disk
        identity = identity_of(engine.model.module, engine.model.path, engine.store.settings)
        agent = disk_store.import_agent(DATA / "stores" / f"{architecture}.bundle", identity)
        assert agent.id == AGENT
        assert check_sound(disk_store) >= 2
    check_continued(architecture, tmp_path)


def test_nothing_that_scripts_read_is_gone(tmp_path):
    """Receipts are equal; of keys, metrics and endpoints there may be more."""
    found, wanted = shapes(scenario.load("llama"), tmp_path), expected("api.json")
    for path, receipt in wanted["receipts"].items():
        assert found["receipts"][path].items() >= receipt.items(), path
    for kind in ("answer keys", "get"):
        for path, keys in wanted[kind].items():
            lasting = {key for key in keys if not key.startswith("written_by_day.")}  # days
            assert lasting <= set(found[kind][path]), f"{kind} of {path}"
    assert set(wanted["metrics"]) <= set(found["metrics"])
    assert set(wanted["openapi"]) <= set(found["openapi"])
