"""Follows the core's leases, residents and stored weights, and charges who uses them."""

from collections.abc import Mapping, Sequence

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from cache_manager.residency import part_of
from common.latest import Latest
from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import ActiveLease, Gpu
from scheduler.core.layer import Layer
from scheduler.core.lifecycle import Lifecycle
from scheduler.features.billing import charges
from scheduler.features.billing.charges import Holding, LeaseBill, Payer, SlotTime
from scheduler.features.billing.use_buckets import Collected, GpuSpan, take_charges
from scheduler.model.values import LeaseId, LeaseUse, SlotId

_NOBODY_ALONE = (charges.NOBODY,)
_MICROSECONDS = 1e6
# What nodes have is reported within this time after a change of leader.
_RETURN_US = 60_000_000


_NO_MODEL = ModelId("")
_MOST_FORMER = 10_000
# Who used the models that left a node's GPUs: they pay for what stays of these there.
FormerUsers = Latest[tuple[NodeId, ModelId], Sequence[str]]


class GpuBook:
    """What a GPU holds, as of the last update, and what is charged for it.

    Unused memory is counted by itself: free, and withheld for programs outside gpufaas.
    """

    def __init__(self, gpu: Gpu, former: FormerUsers, now_us: int) -> None:
        self.cache = gpu.cache
        self._former = former
        self.gpu = gpu.spec.id
        self.node = gpu.spec.node
        self.gpu_type = gpu.spec.gpu_type
        self.charged: list[Payer] = []
        self.residents: dict[ModelId, Holding] = {}
        self.contexts: dict[ModelId, Holding] = {}
        self.slots: dict[SlotId, Holding] = {
            slot.id: Holding(_NO_MODEL, self.gpu, 1, charges.GPU_TIME, None, self.charged, now_us)
            for slot in gpu.slots
        }
        self._counted_us = now_us
        self._span_us = 0
        self._unused_byte_us = 0
        self._unused_bytes = gpu.cache.memory_bytes

    def update(self, model: ModelId, now_us: int) -> Holding | None:
        """Take over what the GPU holds of a model now; returns the model if it is new there.

        In a process that it shares with others, its part of the process's own memory counts too.
        """
        resident, context = self.cache.residents.get(model), self.cache.contexts.get(model)
        self._resize_context(model, 0 if context is None else context.bytes, now_us)
        holding = self.residents.get(model)
        if resident is None:
            if holding is not None:
                self._resize(holding, 0, now_us)
                del self.residents[model]
                self._former[self.node, model] = list(holding.users)
            return None
        size = resident.bytes + part_of(self.cache, model)
        if holding is not None:
            if holding.size != size:
                self._resize(holding, size, now_us)
            return None
        holding = Holding(model, self.gpu, 0, charges.IN_USE, charges.IDLE, self.charged, now_us)
        self._resize(holding, size, now_us)
        self.residents[model] = holding
        return holding

    def settle(self, now_us: int) -> None:
        for holding in self.residents.values():
            holding.settle(now_us)
        for holding in self.contexts.values():
            holding.settle(now_us)
        for holding in self.slots.values():
            holding.settle(now_us)
        self._count(now_us)

    def take_totals(self) -> tuple[int, int, int, int]:
        """Since the last time: slot time, idle slot time, bytes over time, unused bytes over time.

        Settle it before.
        """
        span_us, self._span_us = self._span_us, 0
        unused, self._unused_byte_us = self._unused_byte_us, 0
        idle_us = 0
        for slot in self.slots.values():
            idle_us += slot.unused_us
            slot.unused_us = 0
        return span_us * len(self.slots), idle_us, span_us * self.cache.memory_bytes, unused

    def _resize_context(self, model: ModelId, size: int, now_us: int) -> None:
        """What a model leaves is paid by those who used the model."""
        context = self.contexts.get(model)
        if context is None:
            if not size:
                return
            context = Holding(
                model, self.gpu, 0, charges.CONTEXT, charges.CONTEXT, self.charged, now_us
            )
            self.contexts[model] = context
            left = self.residents.get(model)
            users = self._former.get((self.node, model), ()) if left is None else left.users
            for function in users:
                context.payer(function, now_us)
        if context.size != size:
            self._resize(context, size, now_us)
        if not size:
            del self.contexts[model]

    def _resize(self, holding: Holding, size: int, now_us: int) -> None:
        self._count(now_us)
        self._unused_bytes += holding.size - size
        holding.resize(size, now_us)

    def _count(self, now_us: int) -> None:
        span_us = now_us - self._counted_us
        self._counted_us = now_us
        self._span_us += span_us
        self._unused_byte_us += span_us * self._unused_bytes


class UseMeter(Layer):
    """Charges every microsecond of slots and every byte of memory over time, in whole units.

    What is held is settled only when it changes, or when somebody collects. Times never go back:
    an earlier one counts as the latest.
    """

    def __init__(self, lifecycle: Lifecycle, now: float) -> None:
        cluster = self._cluster = lifecycle.cluster
        self._charged: list[Payer] = []
        self._books: dict[GpuId, GpuBook] = {}
        self._collected: list[Collected] = []
        self._spans: list[GpuSpan] = []
        self._stored: dict[ModelId, dict[NodeId, Holding]] = {}
        self._former = FormerUsers(_MOST_FORMER)
        self._bills: dict[LeaseId, LeaseBill] = {}
        self._slots: dict[SlotId, tuple[GpuBook, Holding]] = {}
        self._now_us = int(now * _MICROSECONDS)
        self._earlier: Mapping[ModelId, Sequence[str]] = {}
        self._earlier_until_us = 0
        self.changes = cluster.index.note_changes()
        self._look(self._now_us)
        lifecycle.switch_on(self)

    def remember(self, users: Mapping[ModelId, Sequence[str]], now: float) -> None:
        """These functions used these models under an earlier leader.

        They pay for what nodes report within a minute, and share it with later users.
        """
        self._earlier = users
        self._earlier_until_us = self._at(now) + _RETURN_US

    # -- what happens -----------------------------------------------------------------------------

    def granted(self, lease: ActiveLease) -> None:
        """The lease's models are resident by now, or lost."""
        payers = self._begin(lease)
        for pending, payer in zip(lease.requests, payers, strict=False):
            if not pending.gave_back:  # else it has had a lease
                payer.add(charges.WAITING, _us(pending.arrived_s, self._cluster.now))

    def adopted(self, lease: ActiveLease) -> None:
        self._begin(lease)

    def rejoined(self, lease: ActiveLease, pending: Pending) -> None:
        """Its requests are known from now on."""
        self.ended(lease)
        self._begin(lease)

    def _begin(self, lease: ActiveLease) -> Sequence[Payer]:
        """Return who pays for the lease's slot."""
        now_us = self._now()
        book, _ = self._slots[lease.slot.id]
        functions = [pending.request.function for pending in lease.requests]
        contended_s = self._cluster.contended_s(lease.slot)
        bill = LeaseBill(functions or _NOBODY_ALONE, now_us, contended_s)
        self._bills[lease.id] = bill
        of_slot: list[Payer] = []
        for model in lease.models:
            payers = self._payers(book, model, bill.functions, now_us)
            of_slot += payers
            holding = book.residents.get(model)
            if holding is not None:
                holding.begin(lease.id, bill, payers, now_us)
        for slot in () if lease.beside else (lease.slot, *lease.more):
            book.slots[slot.id].begin(lease.id, bill, of_slot, now_us)
        if lease.loading:
            self._spend(lease, charges.LOADING)
        return of_slot

    def loaded(self, lease: ActiveLease, *, joins: bool) -> None:
        self._spend(lease, charges.GPU_TIME)
        if joins:
            self._join(lease)

    def _join(self, lease: ActiveLease) -> None:
        """What a lease was beside the runs of others for is loaded: it uses its slot from now."""
        now_us = self._now()
        book, of_slot = self._slots[lease.slot.id]
        bill = self._bills[lease.id]
        payers: list[Payer] = []
        for model in lease.models:
            payers += self._payers(book, model, bill.functions, now_us)
        of_slot.settle(now_us)  # the bill is older than its part in the slot
        of_slot.begin(lease.id, bill, payers, now_us)

    def kept(self, lease: ActiveLease, since_s: float) -> None:
        """No call has run under a lease since then, as is reported now: its caller keeps it."""
        bill = self._bills[lease.id]
        if lease.loading or (bill.time is not None and bill.time.kind == charges.KEPT):
            return
        now = self._cluster.now
        if since_s < now:
            kept_us = min(_us(since_s, now), max(0, self._at(now) - bill.computes_us))
            sharing = max(len(self._slots[lease.slot.id][1].leases), lease.slot.capacity)
            kept_us = kept_us * (1 + len(lease.more)) // sharing
            contended_s = self._cluster.contended_s(lease.slot)
            others_us = min(kept_us, _us(bill.contended_s, contended_s))
            charges.owe_equally(self._payers_of(lease), kept_us, others_us)
        self._spend(lease, charges.KEPT)

    def called(self, lease: ActiveLease, use: LeaseUse, began_s: float, ended_s: float) -> None:
        """A call ran under a lease that its caller keeps, for so long without any other one."""
        self._correct(lease, _us(began_s, ended_s))
        waited_us = _us(use.arrived_s, min(use.began_s, self._cluster.now))
        charges.charge_equally(self._payers_of(lease)[:1], charges.WAITING, waited_us)
        if use.ended_s is None:
            self._spend(lease, charges.GPU_TIME)

    def computed(self, lease: ActiveLease, computed_s: float) -> None:
        """Calls have run for so long, since it was last said, under a lease that is kept."""
        self._correct(lease, _us(0.0, computed_s))

    def _correct(self, lease: ActiveLease, called_us: int) -> None:
        kept = self._bills[lease.id].time
        if kept is None or kept.kind != charges.KEPT:
            return
        self._settle(lease)
        slots, sharing = 1 + len(lease.more), len(self._slots[lease.slot.id][1].leases)
        kept.correct(self._payers_of(lease), called_us * slots // max(1, sharing))
        self._charge_for_others(lease, kept, self._cluster.contended_s(lease.slot))

    def stands_aside(self, lease: ActiveLease) -> None:
        """A lease has its slot no more, until what it loads is there."""
        now_us = self._at(self._cluster.now)
        of_slot = self._slots[lease.slot.id][1]
        bill = self._bills[lease.id]
        of_slot.end(lease.id, bill, now_us)
        del bill.payers[of_slot]

    def ended(self, lease: ActiveLease) -> None:
        now_us = self._at(self._cluster.now)
        bill = self._bills[lease.id]
        if bill.time is not None and bill.time.kind == charges.KEPT:
            self._spend(lease, charges.GPU_TIME)
        del self._bills[lease.id]
        for holding in bill.payers:
            holding.end(lease.id, bill, now_us)

    def after_event(self) -> None:
        """Take over what changed in the index since the last look, which changed now."""
        if self.changes.gpus or self.changes.stored:
            self._look(self._at(self._cluster.now))

    def gpus(self) -> list[GpuId]:
        """The GPUs that have accounts, so that their charges can be collected some at a time."""
        return list(self._books)

    def users(self, model: ModelId) -> list[str]:
        """The functions that pay for what the cluster holds of a model, in order."""
        books = (self._books.get(gpu) for gpu in self._cluster.index.holders(model))
        holdings = [book.residents[model] for book in books if book and model in book.residents]
        holdings += self._stored.get(model, {}).values()
        return sorted({function for holding in holdings for function in holding.users})

    def collect(
        self, now: float, gpus: Sequence[GpuId] | None = None
    ) -> tuple[list[Collected], list[GpuSpan]]:
        """Settle these GPUs (none: the stores; without a list: everything), and collect from them.

        Of each GPU the charges and its own account are those of the same time.
        """
        now_us = self._at(now)
        self._look(now_us)
        wanted = self._books if gpus is None else gpus
        for gpu in wanted:
            book = self._books.get(gpu)
            if book is not None:
                self._close(book, now_us)
        if not gpus:
            for nodes in self._stored.values():
                for stored in nodes.values():
                    stored.settle(now_us)
            self._collected += take_charges(self._charged, "")
        rows, self._collected = self._collected, []
        spans, self._spans = self._spans, []
        return rows, spans

    def _close(self, book: GpuBook, now_us: int) -> None:
        book.settle(now_us)
        self._collected += take_charges(book.charged, book.gpu_type)
        self._spans.append(GpuSpan(book.gpu, book.gpu_type, *book.take_totals()))

    # -- residents and empty processes ------------------------------------------------------------

    def _at(self, now: float) -> int:
        now_us = int(now * _MICROSECONDS)
        self._now_us = max(self._now_us, now_us)
        return self._now_us

    def _now(self) -> int:
        """The time of the event that is handled; what changed on GPUs before it is taken over."""
        now_us = self._at(self._cluster.now)
        if self.changes.gpus:
            self._look(now_us)
        return now_us

    def _payers_of(self, lease: ActiveLease) -> Sequence[Payer]:
        bill, (book, of_slot) = self._bills[lease.id], self._slots[lease.slot.id]
        if of_slot in bill.payers:
            return bill.payers[of_slot]
        return self._payers(book, lease.models[0], bill.functions, self._now_us)

    def _settle(self, lease: ActiveLease) -> int:
        now_us = self._at(self._cluster.now)
        for slot in (lease.slot, *lease.more):
            self._slots[slot.id][1].settle(now_us)
        return now_us

    def _spend(self, lease: ActiveLease, kind: int) -> None:
        """A lease spends its slot's time with this from now on, once its load is over."""
        if lease.loading and kind != charges.LOADING:
            return
        now_us = self._settle(lease)
        bill = self._bills[lease.id]
        before, contended_s = bill.time, self._cluster.contended_s(lease.slot)
        if before is not None and before.kind == charges.KEPT:
            self._charge_for_others(lease, before, contended_s)
        bill.time = None if kind == charges.GPU_TIME else SlotTime(kind, contended_s)
        bill.computes_us, bill.contended_s = now_us, contended_s

    def _charge_for_others(self, lease: ActiveLease, kept: SlotTime, contended_s: float) -> None:
        """Charge for what others have waited while a lease was kept, since the last time.

        If calls ran in what was counted before, that was not kept from others either.
        """
        waited_us = min(kept.kept_us - kept.counted_us, _us(kept.contended_s, contended_s))
        before_us = kept.others_us
        kept.others_us = min(before_us + max(0, waited_us), kept.kept_us)
        kept.counted_us, kept.contended_s = kept.kept_us, contended_s
        charges.charge_equally(
            self._payers_of(lease), charges.KEPT_FROM_OTHERS, kept.others_us - before_us
        )

    def _look(self, now_us: int) -> None:
        changes, index = self.changes, self._cluster.index
        for gpu_id, models in changes.gpus.items():
            book = self._books.get(gpu_id)
            cache = index.gpus.get(gpu_id)
            if book is not None and cache is not book.cache:
                self._close(book, now_us)
                del self._books[gpu_id]
                for slot in book.slots:
                    del self._slots[slot]
                book = None
            gpu = self._cluster.gpus.get(gpu_id)
            if gpu is None or gpu.cache is not cache:
                continue
            if book is None:
                book = self._books[gpu_id] = GpuBook(gpu, self._former, now_us)
                for slot, of_slot in book.slots.items():
                    self._slots[slot] = book, of_slot
                models.update(dict.fromkeys((*gpu.cache.residents, *gpu.cache.contexts)))
            for model in models:
                arrived = book.update(model, now_us)
                if arrived is not None:
                    self._arrived(gpu, book, arrived, now_us)
        changes.gpus.clear()
        for model in changes.stored:
            self._look_at_stores(model, now_us)
        changes.stored.clear()

    def _arrived(self, gpu: Gpu, book: GpuBook, holding: Holding, now_us: int) -> None:
        """A model came: earlier users of its weights may be known, and leases that lost it."""
        model = holding.model
        self._inherit(holding, now_us)
        for slot in gpu.slots:
            for lease in slot.leases.values():
                if model not in lease.models:
                    continue
                bill = self._bills.get(lease.id)
                if bill is None:  # it is about to begin
                    continue
                payers = self._payers(book, model, bill.functions, now_us)
                holding.begin(lease.id, bill, payers, now_us)

    def _payers(
        self, book: GpuBook, model: ModelId, functions: Sequence[str], now_us: int
    ) -> Sequence[Payer]:
        """Who pays for a model under a lease; new users of it share its stored weights too."""
        holding = book.residents.get(model)
        if holding is None:
            return [Payer(function, model, book.gpu, book.charged) for function in functions]
        if len(functions) == 1 and functions[0] in holding.users:
            return (holding.users[functions[0]],)
        if model in self._stored and book.node in self._stored[model]:
            for function in functions:
                self._stored[model][book.node].payer(function, now_us)
        return [holding.payer(function, now_us) for function in functions]

    # -- stored weights ---------------------------------------------------------------------------

    def _look_at_stores(self, model: ModelId, now_us: int) -> None:
        tiers = self._cluster.index.tiers(model)
        nodes = self._stored.setdefault(model, {})
        for node in [node for node in nodes if node not in tiers]:
            nodes.pop(node).settle(now_us)
        size = self._cluster.profiles.weights_bytes(model)
        for node, tier in tiers.items():
            holding = nodes.get(node)
            if holding is None:
                holding = nodes[node] = self._store(node, model, now_us)
            holding.resize(size, now_us)
            holding.idle_charge = charges.HOST if tier is Tier.HOST else charges.DISK
        if not nodes:
            del self._stored[model]

    def _store(self, node: NodeId, model: ModelId, now_us: int) -> Holding:
        """Weights are paid by who uses them on this node, or did before they were stored."""
        holding = Holding(model, None, 0, charges.HOST, charges.HOST, self._charged, now_us)
        users = list(self._former.get((node, model), ()))
        for gpu, cache in self._cluster.index.holders(model).items():
            book = self._books.get(gpu)
            if cache.node == node and book is not None and model in book.residents:
                users += book.residents[model].users
        for function in users:
            holding.payer(function, now_us)
        self._inherit(holding, now_us)
        return holding

    def _inherit(self, holding: Holding, now_us: int) -> None:
        """Charge who used it under an earlier leader, as long as nodes report what they have."""
        if now_us < self._earlier_until_us:
            for function in self._earlier.get(holding.model, ()):
                holding.payer(function, now_us)


def _us(from_s: float, to_s: float) -> int:
    """The microseconds between two times; 0 if the second one comes first."""
    return round(max(0.0, to_s - max(0.0, from_s)) * _MICROSECONDS)
