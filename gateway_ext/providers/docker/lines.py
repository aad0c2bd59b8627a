"""Lines of JSON in a stream of the Engine's, however long they are."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from gateway_ext.errors import ProviderFailed

log = logging.getLogger(__name__)

LONGEST_BYTES = 1 << 20


async def said(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """What each line says; one of more than LONGEST_BYTES is passed over.

    The reader's own lines end at half of that with an error, after which nothing can be read.
    """
    held = bytearray()
    async for data in content.iter_any():
        *ends, rest = data.split(b"\n")
        for end in ends:
            _add(held, end)
            if _is_whole(held) and held.strip():
                yield _read(held)
            held.clear()
        _add(held, rest)
    if _is_whole(held) and held.strip():
        yield _read(held)


def _add(held: bytearray, part: bytes) -> None:
    """Of a line that is too long no more than shows that it is."""
    held += part[: LONGEST_BYTES + 1 - len(held)]


def _is_whole(line: bytearray) -> bool:
    if len(line) <= LONGEST_BYTES:
        return True
    log.warning("a line of the Engine's is passed over: it has more than %d bytes", LONGEST_BYTES)
    return False


def _read(line: bytearray) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ProviderFailed("the Docker Engine says something that is no JSON") from error
    if not isinstance(found, dict):
        raise ProviderFailed("the Docker Engine says something that is no JSON object")
    return found
