"""Values by name, each with the number of the update that brought it: changes since an update."""

from collections.abc import Mapping
from typing import Generic, TypeVar

_Value = TypeVar("_Value")
_MOST_GONE = 4_096


class Versions(Generic[_Value]):
    """Answers which values have changed since an earlier update."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, _Value]] = {}
        self._gone: dict[str, int] = {}
        self._forgot = 0

    def update(self, values: Mapping[str, _Value], number: int) -> None:
        """Take in all present values as the update of this number."""
        kept = self._kept
        for name, value in values.items():
            before = kept.get(name)
            if before is None or before[1] != value:
                kept[name] = (number, value)
        if len(kept) > len(values):
            for name in [name for name in kept if name not in values]:
                del kept[name]
                self._gone.pop(name, None)
                self._gone[name] = number
        while len(self._gone) > _MOST_GONE:
            oldest = next(iter(self._gone))
            self._forgot = self._gone.pop(oldest)

    def has_changes_since(self, number: int) -> bool:
        """Whether the changes since that update are still known."""
        return number >= self._forgot

    def since(self, number: int) -> dict[str, _Value]:
        """Values that are new or different since that update."""
        return {name: value for name, (at, value) in self._kept.items() if at > number}

    def gone_since(self, number: int) -> list[str]:
        """Names that were present at that update or later, and are gone now."""
        return [name for name, at in self._gone.items() if at > number and name not in self._kept]
