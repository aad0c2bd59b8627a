"""What one process lends another: a storage of its device, and what it takes to open it there."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class LentStorage(NamedTuple):
    """A storage as another process of the node opens it.

    It begins at `offset` in the memory of a descriptor, or, where that is -1, in the allocation of
    which the driver's `token` is the name.
    """

    size_bytes: int
    offset: int
    token: bytes
    descriptor: int


class Loan(NamedTuple):
    """A storage that is lent until it is closed: `storage` is what its owner uses meanwhile.

    `close` takes how many others may have it open still.
    """

    lent: LentStorage
    storage: torch.UntypedStorage
    close: Callable[[int], None]


class Borrowed(NamedTuple):
    """A storage that was opened; `in_place` if it is the lender's memory itself."""

    storage: torch.UntypedStorage
    in_place: bool
