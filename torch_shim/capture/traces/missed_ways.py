"""The ways of calling a module for which no graph's guards held, and no trace could be made.

A call may change its arguments, as it appends to a cache: a trace needs copies that were made
before the call. Copies cost time, so that they are made only for calls that look like one that
missed.
"""

from collections.abc import Hashable
from typing import Any

import torch

from torch_shim.tensors.handles import CudaTensor

_MOST_WAYS = 8
# Calls that look like one that missed, and are copied for nothing because a graph answers.
_MOST_COPIES = 16
_DENSE = (torch.Tensor, torch.nn.Parameter, CudaTensor)  # others may have no numbers as sizes
_MANY = 2  # Dynamo compiles for sizes of 0 and of 1 apart, and for all others together


class MissedWays:
    """How calls of one compiled function looked that are to be traced when they recur."""

    def __init__(self) -> None:
        self._left: dict[Hashable, int] = {}

    def recurs(self, args: Any, kwargs: Any) -> bool:
        """Whether a call looks like one that missed, so that its arguments shall be copied."""
        if not self._left:
            return False
        way = _way_of(args, kwargs)
        left = self._left.get(way, 0) - 1
        if left > 0:
            self._left[way] = left
        else:
            self._left.pop(way, None)
        return left >= 0

    def add(self, args: Any, kwargs: Any) -> None:
        """Remember a call that missed and has no copies of its arguments."""
        if len(self._left) >= _MOST_WAYS:
            self._left.pop(next(iter(list(self._left))), None)
        self._left[_way_of(args, kwargs)] = _MOST_COPIES

    def forget(self, args: Any, kwargs: Any) -> None:
        """Forget a way of calling that is traced now."""
        self._left.pop(_way_of(args, kwargs), None)


def _way_of(args: Any, kwargs: Any) -> Hashable:
    """What most calls with one graph have in common, found quickly."""
    return tuple(map(_look_of, args)), tuple((name, _look_of(kwargs[name])) for name in kwargs)


def _look_of(value: Any) -> Hashable:
    kind: type = type(value)
    if kind in _DENSE and not value.is_nested:
        return value.dtype, tuple(min(size, _MANY) for size in value.shape)
    return value if value is None or kind is bool else kind
