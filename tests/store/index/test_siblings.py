"""A conversation that ended inside a block is found among any number of siblings."""

import pytest

from keepwarm.prefix.blocks import BLOCK_TOKENS, pack, root
from keepwarm.store.tier import NEIGHBOURS
from tests.contract.test_tiers import MAKERS
from tests.store.kit import NAMESPACE, first_block, record, tokens_of

PROMPT = [token + 1 for token in tokens_of(BLOCK_TOKENS)]
ENDS = (1, 7, 40, 90)


@pytest.fixture(params=MAKERS)
def tier(request, tmp_path):
    made = MAKERS[request.param](tmp_path, 1 << 28)
    yield made
    made.close()


def siblings(n):
    """Blocks that share 100 and more tokens with the prompt and sort just before or behind it."""
    for number in range(n):
        at, step = 100 + number // 2, -1 if number % 2 else 1
        yield [*PROMPT[:at], PROMPT[at] + step, *tokens_of(BLOCK_TOKENS - at - 1, seed=number)]


def test_every_beginning_is_found_among_many_siblings(tier):
    for tokens in (*siblings(150), *(PROMPT[:n] for n in ENDS)):
        assert tier.put(record(first_block(tokens), n_bytes=16)).stored
    found = tier.children(root(NAMESPACE), pack(PROMPT))
    ends = {first_block(PROMPT[:n]).key: n for n in ENDS}
    assert {c.key: c.n_common for c in found if c.key in ends} == ends
    assert found[0].n_common == 174
    assert len({child.key for child in found}) == len(found) <= 2 * NEIGHBOURS + len(ENDS)
