"""Prefixes and conversations are independent, each in its module."""

import ast
from pathlib import Path

import pytest
from keepwarm.cache.texts import turns

from keepwarm.session import prefixes


@pytest.mark.parametrize(("module", "other"), [(prefixes, "turns"), (turns, "prefixes")])
def test_neither_module_knows_the_other(module, other):
    tree = ast.parse(Path(module.__file__).read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported
    assert not [name for name in imported if other in name]
