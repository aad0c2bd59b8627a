"""JSON objects, one a line, in a stream of the Engine."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from gateway_ext.errors import ProviderFailed

log = logging.getLogger(__name__)

LONGEST_BYTES = 1 << 20


async def objects(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the object of each line; a line above LONGEST_BYTES is skipped.

    `readline` of the HTTP library fails at half of that, and the stream cannot be read further.
    """
    held = bytearray()
    async for data in content.iter_any():
        *ends, rest = data.split(b"\n")
        for end in ends:
            _add(held, end)
            if _is_complete(held) and held.strip():
                yield _read(held)
            held.clear()
        _add(held, rest)
    if _is_complete(held) and held.strip():
        yield _read(held)


def _add(held: bytearray, part: bytes) -> None:
    """Append up to one byte more than the bound, which marks the line as too long."""
    held += part[: LONGEST_BYTES + 1 - len(held)]


def _is_complete(line: bytearray) -> bool:
    if len(line) <= LONGEST_BYTES:
        return True
    log.warning("a line of the Docker Engine is skipped: it has more than %d bytes", LONGEST_BYTES)
    return False


def _read(line: bytearray) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProviderFailed("the Docker Engine sends a line that is no JSON") from error
    if not isinstance(found, dict):
        raise ProviderFailed("the Docker Engine sends a line that is no JSON object")
    return found
