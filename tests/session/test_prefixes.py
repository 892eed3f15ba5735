"""Prefixes and states of conversations: found, replaced, deleted."""

import subprocess
import sys
from dataclasses import replace

import pytest

from keepwarm.session.prefixes import Prefixes, PrefixKey, tools_hash


def tool(name: str, **properties: str) -> dict:
    schema = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER, TIME = tool("weather", city="string", days="integer"), tool("time")
PREFIX = PrefixKey("conv1", "tiny", "Be kind.", (WEATHER, TIME))

OTHERS = {
    "conversation": PREFIX._replace(conversation="conv10"),
    "model": PREFIX._replace(model="other"),
    "system": PREFIX._replace(system="Be kind!"),
    "a tool less": PREFIX._replace(tools=(WEATHER,)),
    "a schema": PREFIX._replace(tools=(tool("weather", city="string", days="number"), TIME)),
}


def test_an_entry_has_what_was_stored():
    prefixes = Prefixes(clock=lambda: 12.5)
    assert prefixes.get(PREFIX) is None
    prefixes.store(PREFIX, [1, 2, 3])
    entry = prefixes.get(PREFIX)
    assert (entry.n_tokens, entry.tokens) == (3, (1, 2, 3))
    assert (entry.conversation, entry.model, entry.system) == PREFIX[:3]
    assert (entry.tools_hash, entry.stored) == (tools_hash(PREFIX.tools), 12.5)
    prefixes.store(PREFIX, [1, 2])
    assert prefixes.get(PREFIX).tokens == (1, 2)
    assert prefixes.stats.entries == 1


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_any_change_is_a_miss_and_spares_the_older_entry(other):
    """Two configurations that alternate both hit."""
    prefixes = Prefixes()
    prefixes.store(PREFIX, [1, 2, 3])
    assert prefixes.get(other) is None
    prefixes.store(other, [1, 9])
    assert prefixes.get(PREFIX).tokens == (1, 2, 3)
    assert prefixes.get(other).tokens == (1, 9)


def test_the_order_of_tools_and_keys_does_not_matter():
    turned = {"function": dict(reversed(WEATHER["function"].items())), "type": "function"}
    assert tools_hash([TIME, turned]) == tools_hash([WEATHER, TIME])
    assert PREFIX._replace(tools=(TIME, turned)).digest == PREFIX.digest


def test_digests_are_the_same_in_every_process():
    """Not Python's own hash, which is seeded by the process."""
    program = (
        "from keepwarm.session.prefixes import PrefixKey; "
        f"print(PrefixKey({', '.join(map(repr, PREFIX))}).digest)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7"},
    )
    assert ran.stdout.strip() == PREFIX.digest


def test_parts_of_a_key_are_kept_apart():
    assert PrefixKey("a", "b", "c").digest != PrefixKey("a", "bc", "").digest
    assert PrefixKey("a", "b", "c").digest != PrefixKey("ab", "", "c").digest


def test_invalidating_forgets_all_models_of_one_conversation_and_no_other():
    """`conv1` is not `conv10`."""
    prefixes = Prefixes()
    for conversation in ("conv1", "conv10", "con", "conv1_tiny"):
        for model in ("tiny", "other"):
            prefixes.store(PrefixKey(conversation, model, "s"), [1])
    assert prefixes.invalidate("conv1") == 2
    assert prefixes.stats.entries == 6
    assert prefixes.get(PrefixKey("conv1", "tiny", "s")) is None
    assert prefixes.get(PrefixKey("conv10", "tiny", "s")) is not None
    assert prefixes.invalidate("conv1") == 0


def test_the_least_recently_used_goes_first():
    prefixes = Prefixes(max_entries=2)
    one, two, three = (PrefixKey(name, "m", "s") for name in ("1", "2", "3"))
    prefixes.store(one, [1])
    prefixes.store(two, [2])
    prefixes.get(one)
    prefixes.store(three, [3])
    assert [prefixes.get(prefix) is not None for prefix in (one, two, three)] == [1, 0, 1]


def test_statistics():
    prefixes = Prefixes()
    prefixes.get(PREFIX)
    prefixes.store(PREFIX, [1, 2, 3])
    for _ in range(3):
        prefixes.get(PREFIX)
    stats = prefixes.stats
    assert (stats.requests, stats.hits, stats.misses, stats.tokens_saved) == (4, 3, 1, 9)
    prefixes.clear()
    assert replace(prefixes.stats) == type(stats)(0, 0, 0, 0)
