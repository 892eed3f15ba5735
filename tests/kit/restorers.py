"""Restorers that plan and ask, and load nothing."""

from keepwarm.cache.restore.rates import Rates
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.kv.layout import Layout
from tests.store.kit import NAMESPACE


def planner_over(tiers, needs, rates=None):
    """One for a model whose layers need this, whatever they are."""
    made = Restorer(NAMESPACE, Layout(()), tiers, None, None, rates or Rates())
    made.needs = needs
    return made
