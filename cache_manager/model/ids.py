"""Ids, sizes and tiers: the vocabulary that every part of gpufaas shares."""

from enum import IntEnum
from typing import NewType

ModelId = NewType("ModelId", str)
NodeId = NewType("NodeId", str)
GpuId = NewType("GpuId", str)

MIB = 1024 * 1024


class Tier(IntEnum):
    """Where a model's weights are; a smaller value is nearer to the GPU's cores."""

    GPU = 0
    HOST = 1
    DISK = 2
    ABSENT = 3
