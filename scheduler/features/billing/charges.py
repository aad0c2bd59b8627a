"""What can be charged, and to whom: whole numbers, so that every sum is exact."""

from collections.abc import Sequence
from typing import Final

from cache_manager.model.ids import GpuId, ModelId
from scheduler.model.values import LeaseId

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


class SlotTime:
    """What a lease spends its slot's time with, if no call computes: a load, or being kept.

    It was kept for `kept_us`, of which `counted_us` were counted when the slot's contention was
    `contended_s`: `others_us` of these were kept from others.
    """

    def __init__(self, kind: int, contended_s: float) -> None:
        self.kind = kind
        self.contended_s = contended_s
        self.kept_us = self.counted_us = self.others_us = 0

    def charge(self, payers: Sequence[Payer], slot_us: int) -> None:
        if self.kind == KEPT:
            self.kept_us += slot_us
        charge_equally(payers, self.kind, slot_us)

    def correct(self, payers: Sequence[Payer], called_us: int) -> None:
        """For so much of the time in which it seemed to be kept a call ran: collected or not."""
        called_us = min(called_us, self.kept_us)
        self.kept_us -= called_us
        for payer, part_us in zip(payers, equal_parts(called_us, len(payers)), strict=True):
            payer.add(KEPT, -part_us)


class LeaseBill:
    """A lease in force since `since_us`: what it holds, and for each thing who pays for it.

    `time` is None while calls compute, from `computes_us` on: the slot's contention was
    `contended_s` then.
    """

    def __init__(self, functions: Sequence[str], since_us: int, contended_s: float) -> None:
        self.functions = functions
        self.since_us = self.computes_us = since_us
        self.contended_s = contended_s
        self.payers: dict[Holding, Sequence[Payer]] = {}
        self.time: SlotTime | None = None

    def pay(self, payers: Sequence[Payer], charge: int, amount: int) -> None:
        charge_equally(payers, charge, amount)
        if self.time is not None and charge == GPU_TIME:
            self.time.charge(payers, amount)


class Holding:
    """`size` units held since `since_us`: its leases pay while they use it, else its `users` do.

    It is settled before its size, its users or the number of its leases changes, except that one
    lease that comes and goes alone settles nothing: `used_us` is the time that such leases paid for
    since the last settlement. What has no charge for its idle time counts that time as `unused_us`.
    """

    def __init__(
        self,
        model: ModelId,
        gpu: GpuId | None,
        size: int,
        use_charge: int,
        idle_charge: int | None,
        charged: list[Payer],
        since_us: int,
    ) -> None:
        self.model = model
        self.gpu = gpu
        self.size = size
        self.use_charge = use_charge
        self.idle_charge = idle_charge
        self.charged = charged
        self.since_us = since_us
        self.used_us = 0
        self.unused_us = 0
        self.leases: dict[LeaseId, LeaseBill] = {}
        self.users: dict[str, Payer] = {}

    def payer(self, function: str, now_us: int) -> Payer:
        """The account of one function, which is among the users from now on."""
        payer = self.users.get(function)
        if payer is None:
            self.settle(now_us)
            payer = Payer(function, self.model, self.gpu, self.charged)
            if function != NOBODY:
                self.users[function] = payer
        return payer

    def begin(self, lease: LeaseId, bill: LeaseBill, payers: Sequence[Payer], now_us: int) -> None:
        if self.leases:
            self.settle(now_us)
        self.leases[lease] = bill
        bill.payers[self] = payers

    def end(self, lease: LeaseId, bill: LeaseBill, now_us: int) -> None:
        if len(self.leases) == 1:
            active_us = now_us - max(self.since_us, bill.since_us)
            if active_us > 0:
                self.used_us += active_us
                bill.pay(bill.payers[self], self.use_charge, self.size * active_us)
        else:
            self.settle(now_us)
        del self.leases[lease]

    def resize(self, size: int, now_us: int) -> None:
        self.settle(now_us)
        self.size = size

    def settle(self, now_us: int) -> None:
        since_us, span_us = self.since_us, now_us - self.since_us
        if span_us <= 0:
            return
        self.since_us = now_us
        idle_us = span_us - self.used_us
        self.used_us = 0
        if len(self.leases) == 1:
            for bill in self.leases.values():
                active_us = now_us - max(since_us, bill.since_us)
                bill.pay(bill.payers[self], self.use_charge, self.size * active_us)
                idle_us -= active_us
        elif self.leases:
            parts = equal_parts(self.size * span_us, len(self.leases))
            for bill, part in zip(self.leases.values(), parts, strict=True):
                bill.pay(bill.payers[self], self.use_charge, part)
            idle_us = 0
        if self.idle_charge is None:
            self.unused_us += idle_us
        elif self.size and idle_us:
            self._charge_idle(self.idle_charge, self.size * idle_us)

    def _charge_idle(self, charge: int, amount: int) -> None:
        if self.users:
            charge_equally(list(self.users.values()), charge, amount)
        else:
            Payer(NOBODY, self.model, self.gpu, self.charged).add(charge, amount)
