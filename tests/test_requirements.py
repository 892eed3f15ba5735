"""`requirements.md` and the tests agree: each id is named by a test or says why it is not built."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LINE = re.compile(r"^- ([SD]\d+(?:-\d\d)?): (.+)$", re.MULTILINE)
REASON = re.compile(r" not built: \S.+\.$")
NAMED = re.compile(r"\b(?:S\d-\d\d|D\d\d?)\b")
RANGE = re.compile(r"\bS(\d)-(\d\d) to S\1-(\d\d)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
REVIEW_POINTS = {f"S4-{number}" for number in range(21, 34)}


def listed(page: str) -> dict[str, str]:
    """Each id and its line; an id given twice fails."""
    lines = LINE.findall(page)
    assert len(lines) == len(dict(lines)) == page.count("\n- ")
    return dict(lines)


def not_built(lines: dict[str, str]) -> set[str]:
    return {name for name, text in lines.items() if REASON.search(text)}


def named(code: str) -> set[str]:
    """The ids in docstrings and comments; `S3-12 to S3-14` names three."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, DOCUMENTED)]
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    text = "\n".join([*comments, *(ast.get_docstring(node) or "" for node in nodes)])
    between = {
        f"S{group}-{number:02}"
        for group, first, last in RANGE.findall(text)
        for number in range(int(first), int(last) + 1)
    }
    return between | set(NAMED.findall(text))


@pytest.fixture(scope="module")
def requirements():
    return listed((TESTS / "requirements.md").read_text())


@pytest.fixture(scope="module")
def shown():
    """What tests name; of this file only `S4-34`, the rest are samples."""
    paths = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    return set().union(*(named(path.read_text()) for path in paths)) | {"S4-34"}


def test_every_requirement_is_shown_or_says_why_not(requirements, shown):
    assert requirements.keys() - shown - not_built(requirements) == set()


def test_every_id_that_a_test_names_is_listed(requirements, shown):
    assert shown - requirements.keys() == set()


def test_what_is_not_built_is_shown_by_no_test(requirements, shown):
    assert not_built(requirements) & shown == set()


def test_every_point_of_the_review_is_built(requirements):
    """S4-34: content not length, prewarming with tools, loops of calls, memory that is freed."""
    assert requirements.keys() >= REVIEW_POINTS
    assert not_built(requirements) & REVIEW_POINTS == set()


def test_ids_are_read_from_docstrings_and_comments_alone():
    """Control for the readers above."""
    code = 'def test_a():\n    """S4-21, S3-01 to S3-03, D2."""\n    x = "S4-22"  # S0-01'
    assert named(code) == {"S4-21", "S3-01", "S3-02", "S3-03", "D2", "S0-01"}
    lines = listed("# A\n- S0-01: A.\n- D2: B. not built: later.\n- S0-02: C. not built:\n")
    assert not_built(lines) == {"D2"}
