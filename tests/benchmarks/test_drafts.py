"""The benchmark of drafts runs, and sees that no answer changes."""

import subprocess
import sys


def test_answers_are_the_same_with_drafts():
    command = [sys.executable, "-m", "benchmarks.drafts", "--tokens", "24", "--turns", "1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert all(line.endswith(" 0 different") for line in lines)
