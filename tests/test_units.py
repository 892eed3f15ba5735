"""Numbers as people read them."""

import pytest

from keepwarm.units import format_bytes, parse_bytes


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


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("1_000", 1000),
        ("20G", 20 << 30),
        ("20 GiB", 20 << 30),
        ("20gb", 20 * 10**9),
        ("1.5k", 1536),
        ("7B", 7),
        ("2T", 2 << 40),
    ],
)
def test_sizes_are_read(text, n_bytes):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "-1", "G", "1.5", "20X", "20 G B", "1e9", "٣", "nan"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ValueError, match=r".*"):
        parse_bytes(text)
