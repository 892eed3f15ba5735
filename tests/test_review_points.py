"""What reviewers found in the change that sessions are modelled on: each point has its test."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
POINTS = {f"S4-{number}" for number in range(21, 34)}


def proven(tree: ast.Module) -> set[str]:
    """The points that docstrings of tests name."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    tests = [function for function in functions if function.name.startswith("test_")]
    return {
        name for test in tests for name in re.findall(r"S4-\d\d", ast.get_docstring(test) or "")
    }


def test_every_point_of_the_review_has_a_test():
    """S4-34: content not length, prewarming with tools, loops of calls, memory that is freed."""
    found = [proven(ast.parse(path.read_text())) for path in TESTS.rglob("test_*.py")]
    assert POINTS - set().union(*found) == set()


def test_only_tests_count():
    """Control for the reader above."""
    code = 'def test_a():\n    """S4-21."""\n\ndef b():\n    """S4-22."""'
    assert proven(ast.parse(code)) == {"S4-21"}
