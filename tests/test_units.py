"""Numbers as people read them."""

import pytest

from keepwarm.units import format_bytes, format_rate, parse_bytes


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (98_362_432, "93.8 MiB"),
        (200 << 20, "200 MiB"),
        (20 << 30, "20.0 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_sizes_are_shown_in_the_units_of_the_settings(n_bytes, text):
    assert format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(999, "999 B/s"), (54e6, "54.0 MB/s"), (118e6, "118 MB/s"), (5e12, "5000 GB/s")],
)
def test_rates_are_shown_in_decimal_units(bytes_per_s, text):
    assert format_rate(bytes_per_s) == text


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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "G",
        "1.5",
        "20X",
        "20 G B",
        "1e9",
        "٣",
        "nan",
        "9" * 400 + "T",
        "9" * 400,
        "2e60B",
        "2000000T",
    ],
)
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ValueError, match=r".*"):
        parse_bytes(text)
