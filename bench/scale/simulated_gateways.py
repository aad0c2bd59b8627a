"""Gateways that keep leases as `gateway_ext/calls/lease_pool.py` does, in simulated time."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.scale.message_counts import Message, MessageCounts
from cache_manager.model.ids import ModelId
from gateway_ext.calls.lease_pool import IDLE_S, PATIENCE_S, REPORT_S
from scheduler.model.events import Event, LeaseReleased, LeaseUsed, RequestArrived, RequestCancelled
from scheduler.model.values import CallEnd, LeaseId, LeaseUse, Request, RequestId, StandingTerms

# What happens at a time: `at(when_s, what)`.
At = Callable[[float, Callable[[], None]], None]


@dataclass(slots=True)
class SimulatedLease:
    """A lease at its gateway; without `terms` it is for one call."""

    id: LeaseId
    shelf: "Shelf"
    terms: StandingTerms | None
    granted_s: float
    ready_s: float
    calls: int = 0
    recalled: bool = False
    free_s: float = 0.0
    known: bool = True  # whether the leader knows the call that runs
    uses: list[LeaseUse] = field(default_factory=list)
    ends: list[CallEnd] = field(default_factory=list)

    def spent(self, now: float) -> bool:
        """Whether no further call may begin under it."""
        terms = self.terms
        if terms is None or self.calls >= terms.calls:
            return True
        return now >= self.granted_s + (terms.slice_s if self.recalled else terms.seconds)

    @property
    def may_idle(self) -> bool:
        """Whether it may be kept while no call uses it."""
        return not self.recalled and self.terms is not None and not self.terms.for_a_slice


@dataclass(slots=True)
class Shelf:
    """The calls of one function at one gateway: those that wait, and its leases."""

    function: str
    model: ModelId
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    questions: deque[RequestId] = field(default_factory=deque)
    free: list[SimulatedLease] = field(default_factory=list)
    count: int = 0  # of leases that stand


class SimulatedGateway:
    """One gateway: sends events to the leader, and counts what it sends."""

    def __init__(
        self,
        name: str,
        at: At,
        send: Callable[[Event], None],
        counts: MessageCounts,
        run_s: Callable[[], float],
    ) -> None:
        self.name = name
        self.served = self.under_kept = 0
        self.waited_s = 0.0
        self.now = 0.0
        self._at = at
        self._send = send
        self._counts = counts
        self._run_s = run_s
        self._shelves: dict[str, Shelf] = {}
        self._leases: dict[LeaseId, SimulatedLease] = {}
        self._asked: dict[RequestId, Shelf] = {}
        self._unreported: dict[LeaseId, SimulatedLease] = {}
        self._calls = 0

    # -- calls ------------------------------------------------------------------------------------

    def call(self, function: str, model: ModelId) -> None:
        """A call arrives."""
        shelf = self._shelves.get(function)
        if shelf is None:
            shelf = self._shelves[function] = Shelf(function, model)
        self._calls += 1
        while shelf.free:
            lease = shelf.free.pop()
            if not lease.spent(self.now):
                self._begin(lease, self._calls, self.now)
                return
            self._give_back(lease)
        shelf.waiting.append((self._calls, self.now))
        if shelf.count:
            self._at(self.now + PATIENCE_S, lambda: self._ask_for_more(shelf))
        else:
            self._ask(shelf)

    def _ask_for_more(self, shelf: Shelf) -> None:
        """One more question, unless each waiting call has one already."""
        ripe = sum(1 for _, since_s in shelf.waiting if since_s <= self.now - PATIENCE_S + 1e-9)
        if len(shelf.questions) < ripe:
            self._ask(shelf)

    def _ask(self, shelf: Shelf) -> None:
        request = RequestId(f"{self.name}.{self._calls}.{len(self._asked)}.{self.now}")
        shelf.questions.append(request)
        self._asked[request] = shelf
        self._counts.add(Message.QUESTION)
        asked = Request(request, shelf.function, (shelf.model,), caller=self.name)
        self._send(RequestArrived(asked))

    def _begin(self, lease: SimulatedLease, call: int, arrived_s: float) -> None:
        began_s = max(self.now, lease.ready_s)
        self.served += 1
        self.waited_s += began_s - arrived_s
        lease.calls += 1
        if lease.calls > 1:
            self.under_kept += 1
        self._at(began_s + self._run_s(), lambda: self._end(lease, call, arrived_s, began_s))

    def _end(self, lease: SimulatedLease, call: int, arrived_s: float, began_s: float) -> None:
        if lease.terms is not None:
            self._note(lease, call, arrived_s, began_s)
        if lease.spent(self.now):
            self._give_back(lease)
        elif lease.shelf.waiting:
            self._begin(lease, *lease.shelf.waiting.popleft())
            self._drop_question(lease.shelf)
        elif lease.may_idle:
            lease.free_s = self.now
            lease.shelf.free.append(lease)
            self._at(self.now + IDLE_S, lambda: self._look(lease))
        else:
            self._give_back(lease)

    def _drop_question(self, shelf: Shelf) -> None:
        """A question without a call that waits for it is taken back."""
        if len(shelf.questions) > len(shelf.waiting):
            request = shelf.questions.popleft()
            del self._asked[request]
            self._counts.add(Message.CANCEL)
            self._send(RequestCancelled(request))

    def _note(self, lease: SimulatedLease, call: int, arrived_s: float, began_s: float) -> None:
        if lease.calls == 1:
            return  # the question's own request ends with its lease
        request = RequestId(f"{self.name}:{call}")
        lease.uses.append(LeaseUse(request, arrived_s, began_s, self.now))
        if not self._unreported:
            self._at(self.now + REPORT_S, self._report)
        self._unreported[lease.id] = lease

    # -- leases -----------------------------------------------------------------------------------

    def granted(
        self, request: RequestId, lease_id: LeaseId, terms: StandingTerms | None, ready_s: float
    ) -> None:
        """The leader answers a question."""
        self._counts.add(Message.GRANT)
        shelf = self._asked.pop(request, None)
        if shelf is None:
            return  # it was taken back meanwhile, and its lease ends
        shelf.questions.remove(request)
        lease = SimulatedLease(lease_id, shelf, terms, self.now, ready_s)
        self._leases[lease_id] = lease
        if terms is not None:
            shelf.count += 1
            lease.ends.append(CallEnd(request, self.now))
        if shelf.waiting:
            self._begin(lease, *shelf.waiting.popleft())
        else:
            self._give_back(lease)

    def recalled(self, lease_id: LeaseId) -> None:
        """The leader wants a lease back."""
        self._counts.add(Message.RECALL)
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        lease.recalled = True
        if lease in lease.shelf.free:
            lease.shelf.free.remove(lease)
            self._give_back(lease)

    def _look(self, lease: SimulatedLease) -> None:
        idle = self.now - lease.free_s >= IDLE_S - 1e-9
        if lease.id in self._leases and lease in lease.shelf.free and idle:
            lease.shelf.free.remove(lease)
            self._give_back(lease)

    def _give_back(self, lease: SimulatedLease) -> None:
        if self._leases.pop(lease.id, None) is None:
            return
        lease.shelf.count -= lease.terms is not None
        if self._unreported.pop(lease.id, None) is not None:
            self._counts.add(Message.REPORT)
            self._send_report(lease)
        self._counts.add(Message.RETURN)
        self._send(LeaseReleased(lease.id))

    def _report(self) -> None:
        unreported, self._unreported = self._unreported, {}
        if unreported:
            self._counts.add(Message.REPORT)
        for lease in unreported.values():
            self._send_report(lease)

    def _send_report(self, lease: SimulatedLease) -> None:
        uses, ends = tuple(lease.uses), tuple(lease.ends)
        lease.uses.clear()
        lease.ends.clear()
        self._counts.add(Message.CALL, len(uses))
        self._send(LeaseUsed(lease.id, lease.shelf.function, uses, ends))
