"""What can be charged, and to whom: whole numbers, so that every sum is exact."""

from collections.abc import Sequence
from typing import Final

from cache_manager.model.ids import GpuId, ModelId

# What is charged: microseconds of a slot, then bytes times microseconds.
GPU_TIME: Final = 0
IN_USE: Final = 1  # in GPU memory, used by a lease
IDLE: Final = 2  # in GPU memory, not used
CONTEXT: Final = 3  # an empty process on a GPU
HOST: Final = 4  # weights in a node's memory
DISK: Final = 5  # weights on a node's disk
# Parts of the GPU time, and how long requests waited for it.
LOADING: Final = 6  # while what the lease is for was being loaded
KEPT: Final = 7  # while no call ran under a lease that its holder kept
KEPT_FROM_OTHERS: Final = 8  # that part of it in which somebody waited for the slot
WAITING: Final = 9  # not GPU time: from a request's arrival to its lease
# Their names in a bill, and those of them that are memory, by the stage of the model.
COLUMNS: Final = (
    *("gpu_us", "used_byte_us", "idle_byte_us", "context_byte_us", "host_byte_us", "disk_byte_us"),
    *("loading_us", "kept_us", "kept_from_others_us", "waiting_us"),
)
STAGES: Final = {"used": IN_USE, "idle": IDLE, "context": CONTEXT, "host": HOST, "disk": DISK}
CHARGES: Final = len(COLUMNS)

NOBODY: Final = ""


class Payer:
    """The account of one function for one model, on one GPU or (without a GPU) in nodes' stores.

    `charged` lists the payers with something on their account that was not collected yet.
    `owed_us` was kept, and charged as computing: as much of that counts as kept when it is
    collected, now or, if it has been collected, of what is computed next; `owed_others_us` of it,
    the last ones, were kept from others.
    """

    def __init__(
        self, function: str, model: ModelId, gpu: GpuId | None, charged: list["Payer"]
    ) -> None:
        self.function = function
        self.model = model
        self.gpu = gpu
        self.charged = charged
        self.listed = False
        self.amounts = [0] * CHARGES
        self.owed_us = self.owed_others_us = 0

    def add(self, charge: int, amount: int) -> None:
        self.amounts[charge] += amount
        if not self.listed:
            self.listed = True
            self.charged.append(self)

    def collect(self) -> list[int]:
        """What was charged since the last collection."""
        amounts, self.amounts = self.amounts, [0] * CHARGES
        self.listed = False
        if self.owed_us:
            repaid_us = min(self.owed_us, computing_us(amounts))
            amounts[KEPT] += repaid_us
            self.owed_us -= repaid_us
            others_us = max(0, self.owed_others_us - self.owed_us)
            amounts[KEPT_FROM_OTHERS] += others_us
            self.owed_others_us -= others_us
        return amounts


def computing_us(amounts: Sequence[int]) -> int:
    """The GPU time that was neither loading nor kept."""
    return max(0, amounts[GPU_TIME] - amounts[LOADING] - amounts[KEPT])


def charge_equally(payers: Sequence[Payer], charge: int, amount: int) -> None:
    """Split an amount to the last unit: the first payers get one unit more than the others."""
    if len(payers) == 1:
        payers[0].add(charge, amount)
        return
    for payer, part in zip(payers, equal_parts(amount, len(payers)), strict=True):
        payer.add(charge, part)


def owe_equally(payers: Sequence[Payer], kept_us: int, others_us: int) -> None:
    """So much that was charged to them as computing was kept, `others_us` of it from others."""
    parts = equal_parts(kept_us, len(payers)), equal_parts(others_us, len(payers))
    for payer, part_us, others_part_us in zip(payers, *parts, strict=True):
        payer.owed_us += part_us
        payer.owed_others_us += others_part_us


def equal_parts(amount: int, count: int) -> list[int]:
    """So many parts: the first ones have one unit more than the others."""
    part, rest = divmod(amount, count)
    return [part + 1 if place < rest else part for place in range(count)]
