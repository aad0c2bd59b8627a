"""Ids, sizes and tiers: the vocabulary that every part of gpufaas shares."""

from enum import IntEnum
from typing import NewType

ModelId = NewType("ModelId", str)
NodeId = NewType("NodeId", str)
GpuId = NewType("GpuId", str)

MIB = 1024 * 1024


def tenant_of(model: ModelId) -> str:
    """The tenant that a model belongs to: the part of its id before the last slash, if any."""
    tenant, slash, _ = model.rpartition("/")
    return tenant if slash else model


class Tier(IntEnum):
    """Where a model's weights are; a smaller value is nearer to the GPU's cores.

    An idle model leaves through these, stage by stage; a call brings it back from any of them.
    """

    GPU = 0
    CONTEXT = 1  # in host memory, with an empty process on the GPU that may take them
    HOST = 2
    DISK = 3
    ABSENT = 4
