"""Files, sockets and SQL on the engine's thread: none but those that are listed here. Locks are
taken in the order of their ranks.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "structure.md"

# At the first use of a model's lane, not of a request.
FIRST_USE = (
    "keepwarm.backend",
    "keepwarm.cache.identity",
    "keepwarm.files",
    "keepwarm.state_file",
    "keepwarm.agents.agent_store.register",
    "keepwarm.engine.padding",
    "keepwarm.engine.sampling.__init__",
    "keepwarm.device.memory.host_memory",
)


@pytest.fixture(scope="module", params=["gemma3_text", "qwen3_next"])
def watched(request, tmp_path_factory):
    """What the threads of an engine did."""
    command = [sys.executable, "-m", "tests.engine.watched", request.param]
    home = tmp_path_factory.mktemp("home")
    done = subprocess.run([*command, str(home)], capture_output=True, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_engine_thread_in_the_golden_scenario_opens_no_file_and_no_socket(watched):
    opened = [name.split(" in ") for name in watched["engine"] if not name.startswith("SQL")]
    assert [where for kind, where in opened if kind == "socket"] == []
    assert [where for _, where in opened if not where.startswith(FIRST_USE)] == []


def test_engine_thread_in_the_golden_scenario_executes_no_sql(watched):
    """Its callers look up what is on disk, before it plans."""
    told = [name.split(" in ") for name in watched["engine"] if name.startswith("SQL")]
    assert [where for _, where in told if not where.startswith(FIRST_USE)] == []


def ranks():
    """The rank of every lock, as the page says."""
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    return {name: int(rank) for rank, names in rows for name in re.findall(r"`(\w+\.\w+)`", names)}


def test_threads_take_locks_by_ascending_rank(watched):
    order = ranks()
    assert ["Writer._changed", "MemoryTier._lock"] in watched["locks"], "locks were watched"
    wrong = [pair for pair in watched["locks"] if not order[pair[0]] < order[pair[1]]]
    assert wrong == []
