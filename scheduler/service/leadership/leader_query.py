"""Asks another scheduler over HTTP whether it leads."""

import aiohttp

_PATIENCE_S = 1.0


async def term_at(url: str) -> int:
    """The term in which the scheduler at this URL leads; 0 if it does not lead or answer."""
    patience = aiohttp.ClientTimeout(total=_PATIENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=patience) as session,
            session.get(url.rstrip("/") + "/readyz") as answer,
        ):
            health = await answer.json()
        return int(health["term"]) if health["leading"] else 0
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError):
        return 0
