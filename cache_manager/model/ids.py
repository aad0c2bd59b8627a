"""Ids, sizes and tiers: the vocabulary that every part of gpufaas shares."""

from enum import IntEnum
from typing import NewType

ModelId = NewType("ModelId", str)
NodeId = NewType("NodeId", str)
GpuId = NewType("GpuId", str)

MIB = 1024 * 1024


class Stage(IntEnum):
    """How far an idle model has left; a call brings it back from any of them."""

    GPU = 1  # weights and context on the GPU
    CONTEXT = 2  # an empty process with its context on the GPU; weights in host memory
    HOST = 3  # weights in host memory
    DISK = 4  # weights on disk; of the function, its process
    GONE = 5


def tenant_of(model: ModelId) -> str:
    """The tenant that a model belongs to: the part of its id before the last slash, if any."""
    tenant, slash, _ = model.rpartition("/")
    return tenant if slash else model


class Tier(IntEnum):
    """Where a model's weights are; a smaller value is nearer to the GPU's cores."""

    GPU = 0
    CONTEXT = 1  # in host memory, with an empty process on the GPU that may take them
    HOST = 2
    DISK = 3
    ABSENT = 4
