"""One thing that is held over time: a slot, a model in memory, an empty process, stored weights."""

from collections.abc import Iterable, Sequence

from cache_manager.model.ids import GpuId, ModelId, NodeId
from scheduler.core.billing.charges import (
    GPU_TIME,
    KEPT,
    NOBODY,
    Payer,
    charge_equally,
    equal_parts,
)
from scheduler.model.values import LeaseId

_MOST_FORMER = 10_000


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
            self._charge_together(self.size * span_us)
            idle_us = 0
        if self.idle_charge is None:
            self.unused_us += idle_us
        elif self.size and idle_us:
            self._charge_idle(self.idle_charge, self.size * idle_us)

    def _charge_together(self, amount: int) -> None:
        part, rest = divmod(amount, len(self.leases))
        for place, bill in enumerate(self.leases.values()):
            bill.pay(bill.payers[self], self.use_charge, part + 1 if place < rest else part)

    def _charge_idle(self, charge: int, amount: int) -> None:
        if self.users:
            charge_equally(list(self.users.values()), charge, amount)
        else:
            Payer(NOBODY, self.model, self.gpu, self.charged).add(charge, amount)


class FormerUsers:
    """Who used the models that left a node's GPUs: they pay for what stays of these there."""

    def __init__(self) -> None:
        self._users: dict[tuple[NodeId, ModelId], Sequence[str]] = {}

    def left(self, node: NodeId, model: ModelId, users: Iterable[str]) -> None:
        """Only the models that left last are remembered."""
        key = node, model
        self._users.pop(key, None)
        self._users[key] = list(users)
        if len(self._users) > _MOST_FORMER:
            del self._users[next(iter(self._users))]

    def of(self, node: NodeId, model: ModelId) -> Sequence[str]:
        return self._users.get((node, model), ())
