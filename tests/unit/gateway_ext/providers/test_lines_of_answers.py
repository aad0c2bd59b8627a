"""Lines of an answer's body, in whatever parts it arrives; longer ones are passed over."""

from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace

import pytest

from gateway_ext.providers import http_api

BODY = b"first\n\n" + b"x" * 50 + b"\nthird\nlast"


async def lines_of(parts: Iterable[bytes], longest_bytes: int) -> tuple[list[bytes], int]:
    """The lines, and how many were told to be too long."""

    async def iter_any() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    told: list[None] = []
    content = SimpleNamespace(iter_any=iter_any)
    read = http_api.lines(content, longest_bytes, lambda: told.append(None))  # type: ignore[arg-type]
    return [line async for line in read], len(told)


def in_parts(body: bytes, size: int) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]


@pytest.mark.parametrize("size", [1, 2, 7, 49, 100])
async def test_lines_are_whole_in_parts_of_any_size(size: int) -> None:
    lines = [b"first", b"", b"x" * 50, b"third", b"last"]
    assert await lines_of(in_parts(BODY, size), 64) == (lines, 0)


@pytest.mark.parametrize("size", [1, 2, 7])
async def test_of_a_line_that_is_too_long_is_told_once(size: int) -> None:
    assert await lines_of(in_parts(BODY, size), 20) == ([b"first", b"", b"third", b"last"], 1)
    assert await lines_of(in_parts(b"y" * 500, size), 20) == ([], 1)


async def test_a_line_in_very_many_parts_is_put_together_once() -> None:
    """Put together anew with each part, it would take half a minute of the event loop."""
    parts = in_parts(b"z" * (1 << 20) + b"\nend", 16)
    assert await lines_of(parts, 1 << 20) == ([b"z" * (1 << 20), b"end"], 0)
