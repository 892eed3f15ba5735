"""Numbers as people read them."""

import pytest

from keepwarm.units import format_bytes


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (98_362_432, "98 MB"),
        (5e12, "5000.0 GB"),
    ],
)
def test_bytes_are_formatted_in_decimal_units(n_bytes, text):
    assert format_bytes(n_bytes) == text
