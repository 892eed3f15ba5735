"""What is deleted from the index is in no page of its file and not in its log."""

import random

from keepwarm.prefix.blocks import chain, pack
from keepwarm.store.index.index import Index
from tests.store.kit import NAMESPACE, files_under, record, tokens_of

N_BLOCKS = 400


def children(seed):
    """Blocks of all lengths beside each other, as headers, in the order in which they come."""
    pick, first = random.Random(seed), tokens_of(256)
    for number in range(N_BLOCKS):
        tokens = tokens_of(pick.choice([256, pick.randrange(2, 256)]), seed=1000 * seed + number)
        (_, ref) = chain(NAMESPACE, first + tokens)
        yield record(ref, n_bytes=16).header, tokens


def found_in(root, words):
    """The files that have one of these 8 bytes anywhere."""
    held = {path.name: path.read_bytes() for path in files_under(root)}
    return [
        name
        for name, data in held.items()
        if any(data[i : i + 8] in words for i in range(len(data)))
    ]


def test_pages_that_were_split_and_merged_keep_nothing(tmp_path):
    """SQLite overwrites what it deletes, but not the copies it leaves when it moves rows."""
    index = Index(tmp_path / "index.sqlite")
    came = list(children(seed=10))
    for header, _ in came:
        index.add(header, 16, now=1.0)
    gone = random.Random(10).sample(came, N_BLOCKS // 2)
    pairs = {pack(tokens[i : i + 2]) for _, tokens in gone for i in range(len(tokens) - 1)}
    assert found_in(tmp_path, pairs)
    index.mark_deleting([header.key for header, _ in gone])
    index.delete_marked([header.key for header, _ in gone])
    index.database.scrub()
    assert not found_in(tmp_path, pairs)
    assert index.lookups.n_blocks() == N_BLOCKS - len(gone)
    index.close()
