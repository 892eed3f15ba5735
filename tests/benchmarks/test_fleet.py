"""The simulation of a fleet counts what it says."""

from benchmarks.fleet import Rates, simulate
from benchmarks.requests.recorded import RecordedConversation

RATES = Rates(prefill_tokens=1000, network_bytes=1e12)
TALK = RecordedConversation([(0.0, 0, 1000, 0), (1.0, 1000, 1100, 0), (2.0, 1100, 1200, 0)])


def run(sticky, shared_tokens, n_servers=2):
    budgets = {"server_tokens": 10**6, "shared_tokens": shared_tokens}
    return simulate([TALK], n_servers, sticky, RATES, **budgets)


def test_three_turns_by_hand():
    """In turn over two servers the second turn is cold, and the third finds the first's tokens."""
    assert run(sticky=True, shared_tokens=0).hit_rate == round(1 - (1000 + 100 + 100) / 3300, 4)
    assert run(sticky=False, shared_tokens=0).hit_rate == round(1 - (1000 + 1100 + 200) / 3300, 4)
    kept = run(sticky=True, shared_tokens=10**6)
    assert kept.written_gb == round(1100 * 131072 / 1e9, 1), "what was used twice"
    assert kept.fetched_gb == 0
    three = RecordedConversation([*TALK.turns, (3.0, 1200, 1300, 0)])
    moved = simulate([three], 3, False, RATES, server_tokens=1050, shared_tokens=10**6)
    assert moved.hit_rate == round(1000 / 4600, 4), "only the fourth turn is on a server again"
