"""`benchmarks.demo`: a process that is really killed, and answers that stay the same."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.demo import (
    BAR,
    EIGHTHS,
    FIRST,
    TURNS,
    DemoReply,
    DemoTurn,
    bar,
    comparison,
    cut_off,
    lines,
)

from tests.cli import environment
from tests.kit.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The whole demo, with a tiny model as the default model."""
    model = write_checkpoint(tmp_path_factory.mktemp("model"), n_context=16384)
    home = tmp_path_factory.mktemp("home")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.demo"],
        cwd=Path(__file__).parents[2],
        env=environment(home, COLUMNS="80", KEEPWARM_MODEL=str(model)),
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_turn_is_drawn_without_and_with_the_cache(shown):
    n_turns = sum(map(len, TURNS.values()))
    drawn = f"([{EIGHTHS.strip()}→]+) +([\\d.]+) s "
    off = re.findall(rf"^\w+ \d +off {drawn}", shown, re.MULTILINE)
    on = re.findall(rf"^ +on +{drawn}", shown, re.MULTILINE)
    assert len(off) == len(on) == n_turns
    assert max(map(len, shown.splitlines())) <= 80
    first_s = float(off[0][1])
    for drawing, seconds in off + on:  # figures are rounded to a hundredth of a second
        wanted = min(BAR, FIRST * float(seconds) / first_s)
        most_wrong = 0.2 + FIRST * 0.006 * (1 + float(seconds) / first_s) / first_s
        assert abs(length(drawing) - wanted) <= most_wrong, (drawing, seconds)


def test_the_prefix_is_shared_and_survives_the_kill(shown):
    before, after = shown.split("killed (kill -9)")
    read = [int(n.replace(",", "")) for n in re.findall(r"^ +on .* s ([\d,]+) of", before, re.M)]
    whole = int(re.search(r"keeper 1.* s ([\d,]+) of", before)[1].replace(",", ""))
    assert read[0] == whole
    assert max(read[1:]) < whole / 10
    assert "rest disk" in after
    n_read, n_prompt = re.search(r"after the kill\s+([\d,]+) of\s+([\d,]+)", shown).groups()
    assert int(n_read.replace(",", "")) < int(n_prompt.replace(",", "")) / 5


def test_answers_are_the_same(shown):
    said = " ".join(shown.split())
    n_turns = sum(map(len, TURNS.values()))
    verdict = f"{n_turns} of {n_turns} compared with and without the cache, identical."
    assert f"Answers: {verdict}" in said
    assert "other tokens" not in said


def reply(text, n_prompt=100, seconds=1.0):
    return DemoReply(text, seconds, n_prompt, {})


def test_another_answer_is_seen():
    """Differences are reported; only answers to different prompts are skipped."""
    assert not DemoTurn("a", 1, reply("x"), reply("x")).differs
    other = DemoTurn("a", 1, reply("x"), reply("y"))
    assert other.differs
    assert "DIFFERENT ANSWER" in "".join(lines(other, 1.0))
    aside = DemoTurn("a", 1, reply("x"), reply("y", n_prompt=99))
    assert not aside.differs
    same = DemoTurn("a", 1, reply("x"), reply("x"))
    assert comparison([same, same]).endswith(
        "2 of 2 compared with and without the cache, identical."
    )
    assert comparison([same, other, aside]).startswith("Answers: 2 of 3 compared")
    assert comparison([same, other, aside]).endswith(", 1 differ.")


def test_what_goes_back_is_not_what_came():
    """Such an answer may have other tokens without the cache."""
    assert cut_off("The lamp is lit bef") == "The lamp is lit ..."
    assert cut_off("Yes") == "Yes ..."
    assert cut_off("") == " ..."


def length(drawing):
    """Of a bar, in characters."""
    return sum(1 if sign == "→" else EIGHTHS.index(sign) / 8 for sign in drawing)


def test_bars_are_as_long_as_their_part():
    assert bar(3.5) == "███▌".ljust(BAR)
    assert bar(BAR) == "█" * BAR
    assert bar(BAR + 1) == "█" * (BAR - 1) + "→"
    assert bar(0.0).strip() == "▏"
    for eighths in range(1, 8 * BAR):
        assert 8 * length(bar(eighths / 8).strip()) == eighths
