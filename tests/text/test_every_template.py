"""Every template and every kind of tokenizer, through all steps from messages to tokens."""

import pytest

from tests.text.test_continuing import check_continued
from tests.text.test_special_tokens import EVERY, check_plain, check_spelled, pairs  # noqa: F401
from tests.text.test_tokenize_incremental import check_incremental, everywhere  # noqa: F401


@pytest.mark.parametrize(("kind", "template"), EVERY)
def test_template_gives_the_same_tokens_however_it_is_rendered(pairs, kind, template):  # noqa: F811
    pair = pairs(kind, template)
    check_plain(pair)
    check_spelled(pair)
    check_incremental(pair.real)
    check_continued(pair.real, template)
