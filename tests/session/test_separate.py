"""Prefixes and states of conversations are independent, each in its module."""

import ast
from pathlib import Path

import pytest

import keepwarm.session
from keepwarm.session.conversations import Conversations, ConversationState
from keepwarm.session.prefixes import Prefixes, PrefixKey


@pytest.mark.parametrize(
    ("module", "other"), [("prefixes", "conversations"), ("conversations", "prefixes")]
)
def test_neither_module_knows_the_other(module, other):
    """S2-21."""
    tree = ast.parse((Path(keepwarm.session.__file__).parent / f"{module}.py").read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported
    assert not [name for name in imported if other in name]


def test_forgetting_in_one_leaves_the_other():
    """S2-21."""
    prefixes, conversations = Prefixes(), Conversations()
    prefix = PrefixKey("ada", "tiny", "Be brief.")
    prefixes.store(prefix, [1, 2, 3])
    conversations.update("ada", "tiny", ConversationState(30, 2))
    prefixes.invalidate("ada")
    assert prefixes.get(prefix) is None
    assert conversations.get("ada", "tiny").n_tokens == 30
    prefixes.store(prefix, [1, 2, 3])
    conversations.invalidate("ada")
    assert conversations.get("ada", "tiny") is None
    assert prefixes.get(prefix) is not None
