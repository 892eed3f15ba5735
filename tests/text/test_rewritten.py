"""Tool results in the tokens of a call that writes them back."""

import json

import pytest

from keepwarm.text.rewritten import MAX_CHARACTERS, rewritten

FILE = 'def load():\n    return "x"\n'


def result(text):
    return {"role": "tool", "content": text}


@pytest.mark.parametrize("number", ["{:6}→", "{:6}\t", "{}: ", "{:4}| "])
def test_line_numbers_are_left_out(number):
    numbered = "".join(number.format(i) + line for i, line in enumerate(FILE.splitlines(True), 9))
    assert list(rewritten([result(numbered)], as_json=False)) == [FILE]
    assert list(rewritten([result(numbered)], as_json=True)) == [json.dumps(FILE)[1:-1]]


def test_what_would_stay_as_it_is_is_in_the_conversation_already():
    assert list(rewritten([result(FILE)], as_json=False)) == []
    assert list(rewritten([result("no quotes, one line")], as_json=True)) == []


def test_a_text_with_a_numbered_list_keeps_its_numbers():
    text = "Steps:\n1: first\n2: second\nThen rest.\n"
    assert list(rewritten([result(text)], as_json=False)) == []


def test_only_results_of_tools_count_the_latest_first_and_no_more_than_fits():
    said = [
        result('"old"'),
        {"role": "user", "content": '"hers"'},
        result('"' + "x" * (MAX_CHARACTERS - 4)),
        result('"a"'),
    ]
    found = list(rewritten(said, as_json=True))
    assert found[0] == '\\"a\\"'
    assert sum(map(len, found)) <= MAX_CHARACTERS + len(found) * 2
    assert not any("old" in text or "hers" in text for text in found)
