"""What became of calls of one model that waited together."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class MergedSums(NamedTuple):
    """Calls that waited together: how many groups ran as one, and the calls in these; how many
    ran both ways to be compared; how many ran singly, by the reason. `never` has the digests of
    programs that must not be merged again, with the reasons."""

    groups: int = 0
    calls: int = 0
    compared: int = 0
    singly: Mapping[str, int] = MappingProxyType({})
    never: Mapping[str, str] = MappingProxyType({})

    def plus(self, other: "MergedSums") -> "MergedSums":
        """Return the sums of both."""
        reasons = {**self.singly, **other.singly}
        singly = {why: self.singly.get(why, 0) + other.singly.get(why, 0) for why in reasons}
        return MergedSums(
            self.groups + other.groups,
            self.calls + other.calls,
            self.compared + other.compared,
            singly,
            {**self.never, **other.never},
        )
