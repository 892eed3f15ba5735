"""The clock of breakers, of what is remembered and of what is measured."""

import pytest


class Clock:
    """It stands still unless a test moves it."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()
