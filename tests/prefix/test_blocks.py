"""Keys: equal means equal prefixes, everywhere and for ever; nothing else is equal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.prefix.blocks import (
    BLOCK_TOKENS,
    KEY_BYTES,
    Namespace,
    chain,
    common_prefix,
    common_tokens,
    common_tokens_beyond,
    pack,
    root,
    unpack,
)

NAMESPACE = Namespace(bytes(range(32)))
TOKEN = st.integers(0, 2**32 - 1)
TOKENS = st.lists(TOKEN, max_size=20)
FEW = st.lists(st.sampled_from([0, 1, 255, 256, 1 << 24]), max_size=12)


@given(TOKENS)
def test_packed_tokens_come_back(tokens):
    assert unpack(pack(tokens)) == tokens
    assert len(pack(tokens)) == 4 * len(tokens)


@given(TOKENS, TOKENS)
def test_bytes_sort_as_tokens_do(a, b):
    """So that an index of bytes finds neighbours of a token sequence."""
    assert (pack(a) < pack(b)) == (a < b)


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1.5], ["a"]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises((OverflowError, TypeError)):
        pack(tokens)


@given(FEW, FEW)
def test_common_tokens_are_counted_as_one_by_one(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_tokens(pack(a), pack(b)) == n


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_the_common_prefix_of_any_two_sequences(a, b):
    pairs = enumerate(zip(a, b, strict=False))
    expected = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
    assert common_prefix(a, b) == common_prefix(list(a), tuple(b)) == expected


@given(FEW, FEW, st.integers(0, 9))
def test_common_tokens_beyond_are_the_common_tokens_or_nothing(a, b, n):
    shared = common_tokens(pack(a), pack(b))
    assert common_tokens_beyond(pack(a), pack(b), n) == (shared if shared > n else 0)


@pytest.mark.parametrize("n_tokens", [0, 1, 255, 256, 257, 512, 1000])
def test_a_chain_covers_the_prompt(n_tokens):
    tokens = list(range(n_tokens))
    refs = list(chain(NAMESPACE, tokens))
    assert [ref.number for ref in refs] == list(range(-(-n_tokens // BLOCK_TOKENS)))
    assert [token for ref in refs for token in unpack(ref.tokens)] == tokens
    assert all(ref.n_tokens == BLOCK_TOKENS for ref in refs[:-1])
    parents = [root(NAMESPACE), *(ref.key for ref in refs)]
    assert [ref.parent for ref in refs] == parents[: len(refs)]
    assert all(len(ref.key) == KEY_BYTES for ref in refs)


@given(st.lists(TOKEN, min_size=1, max_size=600), st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    for ours, theirs in zip(chain(NAMESPACE, tokens), chain(NAMESPACE, other), strict=True):
        assert (ours.key == theirs.key) == (ours.number < at // BLOCK_TOKENS)


def test_keys_are_what_they_always_were():
    """Stored blocks are found for ever, on every machine; a change here loses them all."""
    assert root(NAMESPACE).hex() == ROOT
    assert [ref.key.hex() for ref in chain(NAMESPACE, range(300))] == KEYS


ROOT = "1d202d81b8ada88e11fdb6664a384642c379a041"
KEYS = ["1f3645044694f92a9d8207f03b64aa67beda879b", "07bd014c8a6e588176d548501c0baf6a441b3bb1"]
