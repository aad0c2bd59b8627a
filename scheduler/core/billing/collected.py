"""What a meter has counted since it was last asked."""

from typing import NamedTuple

from cache_manager.model.ids import GpuId, ModelId
from scheduler.core.billing.charges import Payer


class Collected(NamedTuple):
    """What was charged to one function for one model since the last collection.

    `gpu_type` is empty for weights in nodes' stores. Kept time may be below zero: a call ran in
    what was collected as kept before.
    """

    gpu: GpuId | None
    gpu_type: str
    function: str
    model: ModelId
    amounts: list[int]


class GpuSpan(NamedTuple):
    """A GPU's own account since the last collection: what there was of it, and what nobody used."""

    gpu: GpuId
    gpu_type: str
    slot_us: int
    idle_slot_us: int
    byte_us: int
    unused_byte_us: int


def take_charges(charged: list[Payer], gpu_type: str) -> list[Collected]:
    """What these payers were charged since the last collection; empties the list."""
    rows = [
        Collected(payer.gpu, gpu_type, payer.function, payer.model, payer.collect())
        for payer in charged
    ]
    charged.clear()
    return rows
