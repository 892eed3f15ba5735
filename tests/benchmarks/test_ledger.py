"""A server's figures against those of its clients: the program itself, small."""

from benchmarks.ledger.__main__ import run
from benchmarks.ledger.client import KINDS


def test_every_figure_is_what_the_clients_know(tmp_path):
    """All kinds of requests, two keys, a restart, blocks that are evicted."""
    book = run(tmp_path, n_requests=60, n_lives=2, n_clients=2)
    assert book.differences == []
    assert len(book.all) >= 60
    assert sum(book.evicted.values()) > 0
    assert {sent.outcome for sent in book.all} == {"finished", "cancelled", "refused"}
    assert {sent.key for sent in book.all} == {"alice", "bob"}
    assert book.kinds == set(KINDS)
