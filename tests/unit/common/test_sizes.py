"""Sizes as people write them."""

import pytest

from common.errors import BadSize
from common.numerals import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("1000", 1000),
        ("512MiB", 512 * 1024**2),
        ("8GiB", 8 * 1024**3),
        ("2g", 2 * 1024**3),
        ("2G", 2 * 1024**3),
        ("1.5 GiB".replace(" ", ""), 3 * 1024**3 // 2),
        (" 7k ", 7 * 1024),
        ("3GB", 3 * 1000**3),
        ("10b", 10),
        ("0.5TiB", 1024**4 // 2),
    ],
)
def test_size_is_read_when_written_usually(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "GiB", "1 2", "1Gi", "1ib", "1e9", "x", "0.0001"])
def test_size_is_refused_when_it_names_no_bytes(text: str) -> None:
    with pytest.raises(BadSize):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (102_400_000, "97.66 MiB"),
        (150_754_820_096, "140.4 GiB"),
        (-2048, "-2 KiB"),
        (5 * 1024**5, "5120 TiB"),
    ],
)
def test_size_is_written_with_a_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
