"""What comes from a shared tier that anybody can write to is not passed on as one's own."""

import base64

import pytest

from keepwarm import config
from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.signing import BundleKeys, SigningKey
from keepwarm.store.disk.disk import DiskLimits
from keepwarm.store.names import INDEX
from tests.agents.test_signing import write_keys
from tests.kit.engines import ask, engine_on
from tests.kit.runs import prompt_of

FLEET_KEY = base64.b64encode(bytes(32)).decode()
SOON = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """As tests/engine/test_shared.py has it."""
    for name in (
        *("remote.opening.START_S", "remote.uploader.CLOSE_S", "remote.tier.ASK_S"),
        *("remote.tier.MAX_ASK_SHARE", "remote.tier.MIN_READ_S"),
        "cache.restore.restorer.MIN_READ_S",
    ):
        monkeypatch.setattr(f"keepwarm.{name}", SOON)


def machine(model, home, **settings):
    environment = {f"KEEPWARM_{name.upper()}": value for name, value in settings.items()}
    return engine_on(model, home, environment=environment)


def run(engine, prompt, **options):
    return engine.submit(ask(prompt, 4, **options)).result().receipt


@pytest.mark.parametrize("kind", ["plain", "fleet_key", "encryption_key"])
def test_blocks_of_a_plain_shared_tier_are_unverified_and_signed_for_nobody(models, tmp_path, kind):
    """For good, also when the tier is gone and when the index is rebuilt; with a key they are the
    fleet's own.
    """
    place, model, prompt = tmp_path / "shared", models.of("llama"), prompt_of(300)
    place.mkdir()
    key = {} if kind == "plain" else {kind: FLEET_KEY}
    with machine(model, tmp_path / "a", remote=place.as_uri(), **key) as a:
        for _ in range(2):
            assert run(a, prompt).exact  # what it only writes is its own
    with machine(model, tmp_path / "b", remote=place.as_uri(), **key) as b:
        receipt = run(b, prompt, agent="sold")
        assert receipt.reused == {"shared": 256}
        assert receipt.inexact == (("unverified",) if kind == "plain" else ())
        b.wait_until_saved()
        assert run(b, prompt_of(300, seed=9)).exact  # nothing is reused
        for _ in range(2):
            other = run(b, prompt, tenant="other")
        assert other.reused
        assert other.exact  # its blocks are its own
    for path in (tmp_path / "b" / "store").glob(f"{INDEX}*"):
        path.unlink()
    with machine(model, tmp_path / "b", **key) as b:
        receipt = run(b, prompt)
        assert receipt.reused == {"disk": 299}
        assert receipt.exact == (kind != "plain")
        identity = b.lane_of().identity
    private, public = write_keys(tmp_path / "mine")
    secret = key.get("encryption_key")
    limits = DiskLimits(min_free_bytes=0)
    with AgentStore(tmp_path / "b" / "store", limits, secret=secret) as b:
        b.export_agent("sold", tmp_path / "sold.kw", key=SigningKey(private))
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, trusted_keys=str(public))
    with AgentStore(tmp_path / "c", limits) as c:
        made = c.import_agent(tmp_path / "sold.kw", identity, keys=BundleKeys.of(settings))
        assert bool(c.origin_of(made)) == (kind == "plain")


def test_blocks_that_another_process_has_taken_are_unverified_here(models, tmp_path):
    """One that began before, and has no shared tier itself."""
    place, model, prompt = tmp_path / "shared", models.of("llama"), prompt_of(300)
    place.mkdir()
    with machine(model, tmp_path / "a", remote=place.as_uri()) as a:
        for _ in range(2):
            run(a, prompt)
    with machine(model, tmp_path / "b") as one:
        with machine(model, tmp_path / "b", remote=place.as_uri()) as other:
            assert run(other, prompt).reused == {"shared": 256}
            other.wait_until_saved()
        receipt = run(one, prompt)
        assert sum(receipt.reused.values()) >= 256
        assert receipt.inexact == ("unverified",)
