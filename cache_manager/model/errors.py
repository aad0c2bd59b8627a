"""What can go wrong in the cache manager.

CacheError
└── UnknownRule          no eviction or exit rule of that name, or a parameter it does not have
"""


class CacheError(Exception):
    """Base of every error that the cache manager raises."""


class UnknownRule(CacheError):
    """No rule of this kind has this name, or the rule lacks the parameter."""

    def __init__(
        self, name: str, known: tuple[str, ...], detail: str = "", kind: str = "eviction"
    ) -> None:
        super().__init__(
            f"{kind} rule {name!r}: {detail}"
            if detail
            else f"unknown {kind} rule {name!r}; known: {', '.join(known)}"
        )
