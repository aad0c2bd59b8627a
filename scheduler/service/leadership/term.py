"""What a leader works with: one core for its term, the driver of that core, and its history."""

import logging
from asyncio import Event, TimerHandle, get_running_loop
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from cache_manager.model.ids import ModelId
from common.telemetry.traces import Sink
from scheduler.core.core import Core
from scheduler.features.hooks import TermFeature, UseShown
from scheduler.model.actions import Action, Dispatch, Refuse
from scheduler.model.errors import NoGpus, RequestWithdrawn
from scheduler.model.events import Event as CoreEvent
from scheduler.model.events import GpuJoined, LeaseIdsRaised, NodeSnapshot, PolicySet
from scheduler.model.values import (
    LeaseId,
    Placement,
    Request,
    RequestId,
)
from scheduler.recording import VERSION, Beginning
from scheduler.service.driver import Driver, MonotonicClock, nobody_keeps
from scheduler.service.history.history import History, send_sampled
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.metrics import declared
from scheduler.service.metrics.counting import DecisionCounting, SchedulerCounters
from scheduler.settings import Settings
from scheduler.store.recovery import Recovered
from scheduler.store.stored_records import PolicyChoice
from scheduler.wire.model_records import model_record

log = logging.getLogger("scheduler")

_TERM_BITS = 32
_Feature = TypeVar("_Feature", bound=TermFeature)


def first_lease(term: int) -> LeaseId:
    """An id above every lease that an earlier leader can have given."""
    return LeaseId(term << _TERM_BITS)


class Office:
    """Made when a term begins, closed when it ends; leases of later terms have higher ids.

    `term` rises meanwhile if the lease expired and no other scheduler was elected.
    """

    def __init__(
        self,
        settings: Settings,
        term: int,
        meters: SchedulerCounters,
        recovered: Recovered | None = None,
        recorder: RunRecorder | None = None,
        sink: Sink | None = None,
        recall: Callable[[LeaseId], None] = nobody_keeps,
    ) -> None:
        """`recall` tells the caller that keeps a lease to give it back."""
        serving = settings.scheduler
        explained = _WhileFew(serving.explain_slots)
        self.term = term
        beginning = Beginning(
            version=VERSION,
            policy=settings.policy,
            eviction=settings.eviction,
            parameters=dict(settings.parameters),
            max_waiting=serving.max_waiting,
            first_lease=first_lease(term),
            largest_gpu_bytes=serving.largest_gpu_bytes,
            standing=serving.standing,
            exit_rule=settings.exit_rule,
        )
        self.core: Core = beginning.core(explain=explained)
        explained.slots = self.core.cluster.slots
        self.parameters = dict(settings.parameters)
        self.clock = MonotonicClock()
        self.began_s = self.clock.now_s()
        self.closed = False
        self.features: list[TermFeature] = []
        self.observers: list[Callable[[], None]] = []
        ended = partial(send_sampled, sink, self.clock.now_s)
        self._counting = DecisionCounting(self.core, meters, self.clock.now_s)
        leases = self.core.leases
        self.history = History(serving.history, leases, self._counting.freed, ended)
        meters.values[declared.TERMS].add(())
        recovered = recovered or Recovered()
        recovered.restore(self.core)
        self._recorder = recorder
        if recorder is not None:
            known = {
                model: model_record(profile, 0)
                for model, profile in self.core.cluster.profiles.known.items()
            }
            recorder.begins(replace(beginning, models=known))
        self.driver = Driver(self.core, self.clock, log, self._observe, recall, recovered.take)
        self._grace = Event()
        self._grace_s = serving.attach_grace_s
        self._grace_over: TimerHandle | None = None

    def begin_grace(self) -> None:
        """From now on requests wait a short time for the first GPU."""
        self._grace_over = get_running_loop().call_later(self._grace_s, self._grace.set)

    def rise(self, term: int) -> None:
        """Go on in a higher term: this scheduler was elected again, and no other meanwhile.

        Nodes may have had leases of terms in between, before the datastore lost its data.
        """
        self.term = term
        self.driver.report(LeaseIdsRaised(first_lease(term)))

    def close(self) -> None:
        """The term is over: end every waiting request, and decide nothing any more."""
        self.closed = True
        if self._grace_over is not None:
            self._grace_over.cancel()
        self._grace.set()
        self.driver.close()

    async def decide_by(self, choice: PolicyChoice) -> None:
        """Decide by this policy unless it is in force already; no request is lost."""
        name, parameters = choice.name, choice.parameters
        if self.core.placer.policy_name != name or self.parameters != parameters:
            await self.driver.set_policy(name, parameters)

    def feature(self, kind: type[_Feature]) -> _Feature:
        """The feature of this kind, which must be there."""
        return next(feature for feature in self.features if isinstance(feature, kind))

    def users(self, model: ModelId) -> list[str]:
        """The functions that use a model, as far as a feature follows them."""
        return [user for feature in self.features for user in feature.users(model)]

    def used(self, uses: Sequence[tuple[Dispatch, float]]) -> UseShown | None:
        """What a request has used by its parts of leases, if a feature knows."""
        answers = (feature.used(uses) for feature in self.features)
        return next((used for used in answers if used is not None), None)

    @property
    def has_gpus(self) -> bool:
        """Whether some GPU takes requests, or will once its silent node reports again."""
        cluster = self.core.cluster
        return cluster.active_slots > 0 or any(
            gpu.silent and not gpu.draining for gpu in cluster.gpus.values()
        )

    async def acquire(self, request: Request) -> Placement:
        """The driver's `acquire`, which waits a short time for the first GPU; else NoGpus."""
        if not self.has_gpus:
            await self.some_gpu()
        return await self.driver.acquire(request)

    def request(self, request: RequestId) -> Request:
        """A request that has just been given a lease."""
        pending = self.core.requests.get(request)
        if pending is None:  # it ended while its answer was being made
            raise RequestWithdrawn(request, "it has ended")
        return pending.request

    async def some_gpu(self) -> None:
        """Wait a short time for the first GPU; NoGpus if none attached."""
        while not self.has_gpus and not self.closed:
            if self._grace.is_set():
                raise NoGpus
            await self._grace.wait()

    def _observe(self, now: float, event: CoreEvent, actions: Sequence[Action]) -> None:
        took_s = self.clock.now_s() - now
        self._counting(now, event, actions)
        self.history(now, event, actions, took_s)
        if self._recorder is not None:
            self._recorder(now, event, actions)
        kind = type(event)
        if kind in _BRING_GPUS and self.has_gpus:
            self._grace.set()
        elif isinstance(event, PolicySet) and not any(isinstance(a, Refuse) for a in actions):
            self.parameters = dict(event.parameters)
        for observer in self.observers:
            observer()


_BRING_GPUS = frozenset({GpuJoined, NodeSnapshot})


class _WhileFew:
    """Contains every request while there are few slots, so that explaining a decision is cheap."""

    def __init__(self, most_slots: int) -> None:
        self._most_slots = most_slots
        self.slots: Sized = ()

    def __contains__(self, request: object) -> bool:
        return len(self.slots) <= self._most_slots
