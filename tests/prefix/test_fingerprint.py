"""Everything that changes the numbers changes the namespace; nothing else does."""

from dataclasses import fields, replace

import pytest

from keepwarm.prefix.fingerprint import (
    NAMESPACE_BYTES,
    Identity,
    digest,
    namespace,
    salt_of,
    tenant_of,
)

IDENTITY = Identity(
    weights={"a.safetensors": "11" * 32, "b.safetensors": "22" * 32},
    config="33",
    tokenizer="44",
    layout="55",
    kv_options={"bits": 8, "group_size": 64},
)
OTHERS = {
    "weights": [
        {"a.safetensors": "11" * 31 + "12", "b.safetensors": "22" * 32},
        {"a.safetensors": "22" * 32, "b.safetensors": "11" * 32},
        {"a.safetensors": "11" * 32},
        {"a.safetensors": "11" * 32, "c.safetensors": "22" * 32},
    ],
    "config": ["34", ""],
    "tokenizer": ["45"],
    "layout": ["56"],
    "adapter": ["77"],
    "kv_options": [{}, {"bits": 4, "group_size": 64}, {"bits": 8}, {"bits": "8", "group_size": 64}],
    "salt": ["tenant", "Tenant"],
    "block_tokens": [128],
    "format_version": [2],
    "origin": ["an import", "another"],
}


def test_every_field_is_tried():
    """A new field of the identity must be tried below too."""
    assert OTHERS.keys() == {field.name for field in fields(Identity)}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in OTHERS.items() for v in vs])
def test_every_field_counts(name, value):
    """Other weights, tokenizer, adapter, options or tenant: another namespace."""
    assert namespace(replace(IDENTITY, **{name: value})) != namespace(IDENTITY)


def test_the_order_of_files_and_options_does_not_count():
    turned = replace(
        IDENTITY,
        weights=dict(reversed(IDENTITY.weights.items())),
        kv_options=dict(reversed(IDENTITY.kv_options.items())),
    )
    assert namespace(turned) == namespace(IDENTITY)


def test_a_namespace_is_what_it_always_was():
    """The same on every machine; a change here loses every store."""
    assert len(namespace(IDENTITY)) == NAMESPACE_BYTES
    assert namespace(IDENTITY).hex() == GOLDEN


GOLDEN = "5e6b7046c44fdad736de7af9ae7a077ca972b3860b55c2cf59fb18b0ad41a0f4"


@pytest.mark.parametrize(
    ("a", "b"), [([1, 2], [12]), ({"a": None}, {}), ("1", 1), ([[]], []), ("é", "e\u0301")]
)
def test_a_digest_tells_values_apart(a, b):
    assert digest(a) != digest(b)


@pytest.mark.parametrize("tenant", ["", "k1", "mail from bob"])
@pytest.mark.parametrize("start", [0, 500])
def test_a_salt_tells_whose_it_is(tenant, start):
    salt = salt_of(tenant, start)
    assert tenant_of(salt) == tenant
    assert (salt == tenant) == (start == 0)
