"""What a disk has of one prompt is asked once, and known afterwards without the disk."""

import pytest

from keepwarm.prefix.blocks import BLOCK_TOKENS, pack
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import Child
from keepwarm.store.tiers import DiskAnswers
from tests.store.kit import chain_of, keys_of, root_key, tokens_of


class Counted:
    """A tier that counts what it is asked."""

    def __init__(self, tier):
        self.tier = tier
        self.n_asked = 0

    def __getattr__(self, name):
        self.n_asked += 1
        return getattr(self.tier, name)


@pytest.fixture
def records():
    return chain_of(3)


@pytest.fixture
def tier(records):
    tier = MemoryTier(1 << 20)
    tier.put(records[0])
    yield Counted(tier)
    tier.close()


def test_disk_answers_ask_the_disk_once_and_not_after_close(tier, records):
    answers, keys = DiskAnswers(tier, {}), keys_of(records)
    found = answers.have(keys)
    assert found.keys() == {keys[0]}
    start = pack(tokens_of(BLOCK_TOKENS))
    children, states = answers.children(root_key(), start), answers.states([root_key()])
    assert children == [Child(keys[0], BLOCK_TOKENS)]
    answers.close()
    n_asked = tier.n_asked
    assert n_asked == 3
    tier.put(records[1])
    assert answers.have(keys) == found
    assert answers.children(root_key(), start) == children
    assert answers.states([root_key()]) == states == []
    assert answers.children(keys[0], b"") == []
    assert tier.n_asked == n_asked + 1, "only the test's own put"


def test_disk_answers_of_a_shorter_prompt_share_no_more_tokens_than_it_has(tier):
    answers = DiskAnswers(tier, {})
    whole = pack(tokens_of(BLOCK_TOKENS))
    answers.children(root_key(), whole)
    answers.close()
    assert [child.n_common for child in answers.children(root_key(), whole[: 4 * 100])] == [100]


def test_disk_answers_know_what_this_process_wrote_since(tier, records):
    written, keys = {}, keys_of(records)
    answers = DiskAnswers(tier, written)
    answers.have(keys)
    answers.close()
    tier.put(records[1])
    written |= tier.tier.have([keys[1]])
    assert answers.have(keys).keys() == {keys[0], keys[1]}


def test_disk_answers_do_not_know_what_was_written_and_deleted_before(tier, records):
    keys = keys_of(records)
    written = tier.tier.have(keys)
    tier.tier.delete_all([keys[0]])
    answers = DiskAnswers(tier, written)
    assert answers.have(keys) == {}
    answers.close()
    assert answers.have(keys) == {}
    tier.put(records[0])
    written |= {key: info._replace() for key, info in tier.tier.have(keys).items()}  # once more
    assert answers.have(keys).keys() == {keys[0]}
