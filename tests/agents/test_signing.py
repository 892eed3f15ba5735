"""Keys in files, signatures of bundles, and what each refusal says."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from keepwarm import config
from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.signing import BundleKeys, SigningKey, read_public_key
from keepwarm.errors import BadCacheFile, BadInput
from keepwarm.prefix.blocks import chain
from tests.agents.test_agents import IDENTITY, LIMITS, NAME, turn
from tests.store.kit import tokens_of


def write_keys(stem, key=None, lock=None):
    """A private and a public key, as `openssl genpkey` and `openssl pkey -pubout` write them."""
    key = key or Ed25519PrivateKey.generate()
    private, public = stem.with_suffix(".pem"), stem.with_suffix(".pub")
    private.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock or NoEncryption())
    )
    private.chmod(0o600)
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def stores(tmp_path):
    with (
        AgentStore(tmp_path / "here", LIMITS) as here,
        AgentStore(tmp_path / "there", LIMITS) as there,
    ):
        here.register(IDENTITY)
        turn(here, "a", tokens_of(700))
        yield here, there


def settings_of(tmp_path, **values):
    return config.load({"KEEPWARM_HOME": str(tmp_path)}, **values)


def test_what_is_signed_by_a_trusted_key_is_ordinary(stores, tmp_path):
    here, there = stores
    private, public = write_keys(tmp_path / "mine")
    here.export_agent("a", tmp_path / "a.kw", key=SigningKey(private))
    keys = BundleKeys.of(settings_of(tmp_path, trusted_keys=str(public)))
    made = there.import_agent(tmp_path / "a.kw", IDENTITY, keys=keys)
    assert made.blocks == tuple(ref.key for ref in chain(NAME, tokens_of(700)))
    assert there.origin_of(made) == ""
    stranger = there.import_agent(tmp_path / "a.kw", IDENTITY, "b")
    assert there.origin_of(stranger)
    assert not set(stranger.blocks) & set(made.blocks)


def test_a_key_that_is_asked_for_must_have_signed(stores, tmp_path):
    here, there = stores
    private, _ = write_keys(tmp_path / "mine")
    _, other = write_keys(tmp_path / "other")
    only = BundleKeys.of(settings_of(tmp_path), trust=[other])
    for key in (None, SigningKey(private)):
        here.export_agent("a", tmp_path / "a.kw", key=key)
        with pytest.raises(BadCacheFile, match="not computed and signed by the owner of that key"):
            there.import_agent(tmp_path / "a.kw", IDENTITY, keys=only)
    assert list(there.disk.walk()) == list(there.agents.all()) == []


@pytest.mark.parametrize("kind", ["a text", "another kind", "locked", "shown", "absent"])
def test_what_is_no_key_is_one_sentence(kind, tmp_path):
    key = ec.generate_private_key(ec.SECP256R1()) if kind == "another kind" else None
    lock = BestAvailableEncryption(b"secret") if kind == "locked" else None
    private, public = write_keys(tmp_path / "key", key, lock)
    if kind == "a text":
        private.write_text("hello")
        public.write_text("hello")
    if kind == "absent":
        private.unlink()
        public.unlink()
    private.chmod(0o644) if kind == "shown" else None
    says = {"shown": "chmod 600", "absent": "cannot be read"}.get(kind, "openssl genpkey")
    with pytest.raises(BadInput, match=says):
        SigningKey(private)
    if kind in ("a text", "another kind", "absent"):
        with pytest.raises(BadInput, match=says):
            read_public_key(public)
