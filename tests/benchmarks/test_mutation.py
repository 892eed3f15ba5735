"""Mutants of the source: what is changed, that it takes hold, and that it comes to an end."""

import itertools
import sys
import time
from textwrap import dedent

import pytest
from benchmarks.mutation.__main__ import drawn, escaped
from benchmarks.mutation.nearest import Suite
from benchmarks.mutation.running import NO_END, in_fork, judge
from benchmarks.mutation.sites import Mutant, install, mutants_of

SOURCE = '''
    import logging
    from functools import cache

    LOG = logging.getLogger(__name__)
    LIMIT = 3

    def clamp(n: int = 5) -> int:
        """The smaller one."""
        if n < LIMIT:
            return n
        raise ValueError(f"{n + 1} is more than {LIMIT}")

    class Counter:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def add(self, n: int) -> None:
            LOG.debug("adds %d", n + 1)
            self.seen.append(n)

        @property
        def total(self) -> int:
            assert 1 + 1
            return sum(self.seen) + 0

        @staticmethod
        @cache
        def twice(n: int) -> int:
            return n + n
'''

VERDICTS = ("killed", "does not end", "survived", "not called")


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "counted.py").write_text(dedent(SOURCE))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "counted.py"
    sys.modules.pop("counted", None)


def test_only_what_a_function_does_is_changed(module):
    """No constant of the module, default, message, log line or assertion."""
    changes = [(m.function, m.change) for m in mutants_of("counted", module)]
    assert changes == [
        ("clamp", "n < LIMIT → not"),
        ("clamp", "Lt → LtE"),
        ("Counter.add", "self.seen.append(n) → nothing"),
        ("Counter.total", "Add → Sub"),
        ("Counter.total", "0 → 1"),
        ("Counter.twice", "Add → Sub"),
    ]


def test_a_mutant_takes_hold_for_whoever_holds_the_function(module):
    """Functions, methods, properties, and what decorators hide."""
    import counted

    clamp, counter, twice = counted.clamp, counted.Counter(), counted.Counter.twice
    _, wider, forgetful, _, one_more, nothing = mutants_of("counted", module)
    for mutant in (wider, forgetful, one_more, nothing):
        install(mutant)
    counter.add(7)
    assert (clamp(3), counter.total, twice(4)) == (3, 1, 0)


def test_a_mutant_keeps_its_identity_while_its_body_stays(module, tmp_path):
    """In another module too, and under another docstring, so that two commits can be compared."""

    def identities(name, path):
        return {(m.function, m.change): m.identity for m in mutants_of(name, path)}

    before = identities("counted", module)
    assert len(set(before.values())) == len(before)
    moved = "def first(n):\n    return n + 2\n" + module.read_text()
    moved = moved.replace("sum(self.seen) + 0", "sum(self.seen) - 0").replace("The smaller", "A")
    (tmp_path / "elsewhere.py").write_text(moved)
    after = identities("elsewhere", tmp_path / "elsewhere.py")
    kept = {key for key in before if before[key] == after.get(key)}
    assert kept == {key for key in before if key[0] != "Counter.total"}


def test_a_draw_depends_on_seed_and_identities_alone(module):
    mutants = mutants_of("counted", module)
    three = drawn(mutants, seed=1, count=3)
    assert drawn([*reversed(mutants), *mutants], seed=1, count=3) == three
    assert any(drawn(mutants, seed=seed, count=3) != three for seed in range(2, 9))
    assert drawn(mutants, seed=1, count=99)[:3] == three


def test_compared_runs_name_what_was_killed_and_survives():
    earlier = [{"identity": i, "verdict": v} for i, v in zip("abcd", VERDICTS, strict=True)]
    now = [{"identity": i, "verdict": "survived"} for i in "xdcba"]
    assert [before["identity"] for before, _ in escaped(earlier, now)] == ["b", "a"]
    assert escaped(earlier, [{"identity": "a", "verdict": "killed"}]) == []


def test_nearest_tests_are_those_of_the_folder_and_then_importers(tmp_path):
    texts = {
        "store/disk/test_files.py": "",
        "store/test_journal.py": "",
        "store/test_other.py": "Journal()",
        "server/test_app.py": "from keepwarm.store import files, journal",
        "server/test_far.py": "from keepwarm.store import files",
        "cli/test_run.py": "from keepwarm.store.journal import Journal",
    }
    for name, text in texts.items():
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    mutant = Mutant("keepwarm.store.journal", "Journal.add", 1, "0 → 1", 0, "")
    assert [file.removeprefix("tests/") for file in Suite(tmp_path).nearest(mutant)] == [
        "store/test_journal.py",
        "store/test_other.py",
        "store/disk/test_files.py",
        "cli/test_run.py",
        "server/test_app.py",
    ]


@pytest.mark.parametrize(
    ("test", "seconds", "expected"),
    [
        ("assert counted.clamp(3) == 0", 300, ("killed", "test_it.py::test_it", 1, 1, False)),
        ("assert counted.clamp(1) == 1", 300, ("survived", "", 1, 1, False)),
        ("assert counted.LIMIT == 3", 300, ("not called", "", 1, 0, False)),
        ("assert counted.clamp(3) == 0", 0, ("not called", "", 0, 0, True)),
    ],
)
def test_judged_mutant_has_the_verdict_of_its_tests(module, monkeypatch, test, seconds, expected):
    test_file = module.with_name("test_it.py")
    test_file.write_text(f"import counted\n\ndef test_it():\n    {test}\n")
    monkeypatch.chdir(module.parent)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    _, wider, *_ = mutants_of("counted", module)
    assert tuple(judge(wider, ["test_it.py"], seconds)) == expected


def test_work_in_a_fork_has_an_exit_status_and_a_time_limit():
    assert in_fork(lambda: 7, 300) == 7
    assert in_fork(lambda: 1 // 0, 300) == 98
    assert in_fork(lambda: time.sleep(3600) or 0, 300, idle_s=0.1) == NO_END
    assert in_fork(lambda: max(itertools.count()), 1) == NO_END
