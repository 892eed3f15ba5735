"""The engine's thread uses no file, no socket, no SQL and no log. Locks are taken in the order of
their ranks.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "structure.md"


@pytest.fixture(scope="module", params=["gemma3_text", "qwen3_next"])
def watched(request, tmp_path_factory):
    """What the threads of an engine did."""
    command = [sys.executable, "-m", "tests.engine.watched", request.param]
    home = tmp_path_factory.mktemp("home")
    done = subprocess.run([*command, str(home)], capture_output=True, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_engine_thread_in_the_golden_scenario_uses_no_file_no_socket_no_sql_and_no_log(watched):
    """Its callers make lanes and look up what is on disk, before it plans."""
    assert watched["callers"] == ["SQL", "file", "log"], "all three were watched"
    assert watched["engine"] == {}


def ranks():
    """The rank of every lock, as the page says."""
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    return {name: int(rank) for rank, names in rows for name in re.findall(r"`(\w+\.\w+)`", names)}


def test_threads_take_locks_by_ascending_rank(watched):
    order = ranks()
    assert ["Writer._changed", "MemoryTier._lock"] in watched["locks"], "locks were watched"
    wrong = [pair for pair in watched["locks"] if not order[pair[0]] < order[pair[1]]]
    assert wrong == []
