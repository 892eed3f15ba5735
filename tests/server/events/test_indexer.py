"""A stock indexer knows what the server has."""

import pytest

from tests.server.events.indexer_soak import LOST, measure


@pytest.mark.soak
def test_the_indexer_agrees_with_our_own_look_up(models, tmp_path):
    """1,000 random prompts after puts, evictions, lost messages, a restart, and more puts."""
    phases = measure(models.of("llama"), tmp_path)
    assert len(phases) == 7
    for phase in phases:
        assert (phase.n_equal == phase.n_asked) == (phase.name != LOST), phase
        assert sum(phase.by_depth.values()) - phase.by_depth[0] > 100, "or it proves nothing"
