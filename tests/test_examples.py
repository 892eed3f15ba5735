"""Every example runs as documented, and its claims about its own output are true."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.kit.checkpoints import write_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def output(capsys, monkeypatch):
    """A function: what an example prints, run as a program in this process."""

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def claims(text: str) -> list[str]:
    return re.findall(r"^  (same .*): (?:True|False)$", text, re.MULTILINE)


def test_every_example_is_run_somewhere():
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    examples = [path.name for path in EXAMPLES.glob("*.py")]
    assert [name for name in examples if f'"{name}"' not in tests] == []


def test_batch(checkpoint, output):
    """Rows of different lengths, padded by `prepare` alone."""
    text = output("batch.py", "--model", checkpoint, "--max-tokens", 6)
    assert claims(text) == ["same as alone"] * 3
    assert "False" not in text
    sums = re.findall(r"(\d+) shared \+ (\d+) own \+ 6 generated = (\d+) in the cache", text)
    assert len({own for _, own, _ in sums}) == 3
    assert all(int(shared) + int(own) + 6 == int(held) for shared, own, held in sums)


def test_beam(checkpoint, output):
    """Rows taken out, doubled and merged again keep their own history."""
    text = output("beam.py", "--model", checkpoint, "--max-tokens", 6, "--width", 3)
    assert claims(text) == ["same score alone"] * 3
    assert "False" not in text
    scores = [float(score) for score in re.findall(r"^ *(-\d+\.\d+) '", text, re.MULTILINE)]
    assert len(set(scores)) == 3
    assert scores == sorted(scores, reverse=True)


def test_dynamic_batching(checkpoint, output):
    """Rows join and leave while others continue."""
    text = output("dynamic_batching.py", "--model", checkpoint)
    assert claims(text) == ["same as alone"] * 4
    assert "False" not in text
    present = re.findall(r"^step \d+: (.*)$", text, re.MULTILINE)
    assert present == ["A B", "A B", "A B C", "A C", "A C", "A C", "A D", "A D", "D", "idle"]
