"""Mutants of the source: what is changed, that it takes hold, and that it comes to an end."""

import itertools
import sys
import time
from textwrap import dedent

import pytest
from benchmarks.mutation.running import NO_END, Recorder, in_fork
from benchmarks.mutation.sites import install, mutants_of

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


def test_a_mutant_is_known_for_as_long_as_its_function_stays(module):
    """So a verdict and a sample outlive changes elsewhere in the module."""

    def marks():
        return {(m.function, m.change): m.mark for m in mutants_of("counted", module)}

    before = marks()
    assert len(set(before.values())) == len(before)
    moved = "def first(n):\n    return n + 2\n" + module.read_text()
    module.write_text(moved.replace("n < LIMIT", "n <= LIMIT"))
    after = marks()
    kept = {key for key in before if before[key] == after.get(key)}
    assert kept == {key for key in before if key[0] != "clamp"}


def test_work_in_a_fork_has_an_exit_status_and_a_time_limit():
    assert in_fork(lambda: 7, 300) == 7
    assert in_fork(lambda: 1 // 0, 300) == 98
    assert in_fork(lambda: time.sleep(3600) or 0, 300, idle_s=0.1) == NO_END
    assert in_fork(lambda: max(itertools.count()), 1) == NO_END


def test_calls_are_noted_by_test(tmp_path):
    """Those of the package alone, on threads too, each for the test that made them."""
    package = tmp_path / "src" / "keepwarm"
    package.mkdir(parents=True)
    code = compile("def used(): return 1", str(package / "some.py"), "exec")
    names = {}
    exec(code, names)
    recorder = Recorder(tmp_path)

    class Item:
        nodeid = "test_one"

    around = recorder.pytest_runtest_protocol(Item())
    before = sys.gettrace()
    next(around)
    names["used"]()
    dedent("not ours")
    with pytest.raises(StopIteration):
        next(around)
    sys.settrace(before)
    assert recorder.tests["test_one"]["calls"] == ["keepwarm.some:used"]
