"""Caches of libraries that keep what tests made and left."""

from fastapi.dependencies import models

_CACHES = [each for each in vars(models).values() if hasattr(each, "cache_clear")]


def forget_endpoints() -> None:
    """Empty FastAPI's caches: each endpoint in them keeps its whole application.

    A process has one application; that of the tests would keep those of its last hundred tests,
    and a full collection of garbage then takes a second.
    """
    for cache in _CACHES:
        cache.cache_clear()
