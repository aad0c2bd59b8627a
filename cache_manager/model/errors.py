"""What can go wrong in the cache manager.

CacheError
├── UnknownRule          no eviction or exit rule of that name, or a parameter it does not have
└── GpuNotHeld           a GPU that was never added to the index
"""


class CacheError(Exception):
    """Base of every error that the cache manager raises."""


class UnknownRule(CacheError):
    """No rule of this kind has this name, or the rule lacks the parameter."""

    def __init__(
        self, name: str, known: tuple[str, ...], detail: str = "", kind: str = "eviction"
    ) -> None:
        self.name = name
        self.known = known
        super().__init__(
            f"{kind} rule {name!r}: {detail}"
            if detail
            else f"unknown {kind} rule {name!r}; known: {', '.join(known)}"
        )


class GpuNotHeld(CacheError):
    """The index holds no GPU of this id."""

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        super().__init__(f"the cache index holds no GPU {gpu!r}")
