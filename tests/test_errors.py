"""Every error crosses the border of a process."""

import inspect
import pickle
import re

import pytest

from keepwarm import errors

VALUES = {"block": 3, "n_tokens": 5, "most": 4, "retry_after_s": 2.5, "where": "Layer 2", "got": 7}
CLASSES = [
    each
    for _, each in inspect.getmembers(errors, inspect.isclass)
    if issubclass(each, errors.KeepwarmError)
]


def test_the_tree_in_the_text_has_every_class_and_its_status():
    said = re.findall(r"(\w+) +(\d{3})\b", errors.__doc__)
    assert dict(said) == {each.__name__: str(each.status) for each in CLASSES}


@pytest.mark.parametrize("error", CLASSES)
def test_an_error_is_the_same_in_another_process(error):
    names = list(inspect.signature(error.__init__).parameters)[1:]
    sent = error(*(VALUES.get(name, f"the {name}") for name in names))
    found = pickle.loads(pickle.dumps(sent))
    assert type(found) is error
    assert (str(found), vars(found)) == (str(sent), vars(sent))
