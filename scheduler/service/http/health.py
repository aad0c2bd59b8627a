"""Whether a scheduler serves: what /readyz answers."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Health:
    """`ready`: callers are served, by this scheduler or by the leader that it names.

    A leader all of whose GPUs have loads that make no progress serves nobody who needs another
    load; without GPUs it waits for some. `stuck` names these loads, and those of some GPUs,
    or is their number.
    `store` is `memory`, `ok`, or `lost` (served from memory until it is back). A leader that is not
    `confirmed` cannot ask the datastore whether another scheduler was elected meanwhile.
    """

    ready: bool
    leading: bool
    confirmed: bool
    term: int | None
    leader: str | None
    store: str
    gpus: int
    stuck: tuple[str, ...] | int = ()

    def without_names(self) -> Self:
        """Return what everybody may see: names of models and functions are their tenants'."""
        return self if isinstance(self.stuck, int) else replace(self, stuck=len(self.stuck))
