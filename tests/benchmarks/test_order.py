"""The program that asks a model whether it minds the order of its prompt."""

import pytest
from benchmarks.order import Loss, Pair, compare
from tokenizers import Tokenizer

from keepwarm import config
from keepwarm.models.load import load
from tests.kit.agent_model import SMALL, TOKENIZER, TOOLS_CHATML
from tests.kit.checkpoints import write_checkpoint


def loaded(folder, template):
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    write_checkpoint(folder, template=template, n_context=8192, tokenizer=tokenizer, shape=SMALL)
    return load(str(folder), config.load({}, home=None))


def test_answers_are_likely_in_one_order_or_the_other(tmp_path):
    """Of random weights, both: but the prompts differ, and so do the numbers."""
    pairs = compare(loaded(tmp_path, TOOLS_CHATML), n_projects=1)
    assert [pair.kind for pair in pairs] == ["directory", "branch", "rule", "call"]
    assert all(pair.as_sent < 0 and pair.stable_first < 0 for pair in pairs)
    assert all(pair.loss != 0 for pair in pairs)


def test_a_template_that_cannot_be_reordered_is_named(tmp_path):
    refuses = "{{ raise_exception('one system message') }}"
    check = "{% for m in messages[1:] if m.role == 'system' %}" + refuses + "{% endfor %}"
    model = loaded(tmp_path, check + TOOLS_CHATML)
    with pytest.raises(SystemExit, match="no second system message"):
        compare(model, n_projects=1)


def test_no_loss_is_said_only_where_it_is_shown():
    def pairs(*losses):
        return [Pair("rule", 0.0, -loss) for loss in losses]

    assert Loss.of(pairs(0.001, -0.001, 0.0, 0.0)).is_none
    assert not Loss.of(pairs(0.5, -0.5, 0.3, -0.3)).is_none  # too uncertain
    assert not Loss.of(pairs(0.1, 0.1, 0.11, 0.1)).is_none
