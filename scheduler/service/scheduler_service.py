"""One scheduler process: campaigns, serves while it leads, and else names the leader to callers."""

import logging
import time
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from cache_manager.model.ids import NodeId
from common.http.accepted_line import AcceptedLine
from common.stream_upgrade import StreamRequest
from common.telemetry.traces import Sink
from scheduler.api import Placement
from scheduler.core.billing.use_buckets import UseBuckets
from scheduler.core.slots import Gpu
from scheduler.model.errors import DatastoreError, NotLeading
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import Request
from scheduler.service.access import ApiAccess
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.leadership.election import LeaderInfo, Leadership
from scheduler.service.leadership.policy_in_force import PolicyInForce, follow_policy
from scheduler.service.leadership.rivals import standing_by, term_at, watch_rivals
from scheduler.service.leadership.term import Office
from scheduler.service.metrics import declared
from scheduler.service.metrics.counters import SchedulerCounters
from scheduler.service.metrics.gauges import MetricsPage
from scheduler.service.settings import Settings
from scheduler.service.streams.callers import CallerLeases, CallerLines, CallerStreams
from scheduler.service.streams.nodes import NodeStreams, turn_away
from scheduler.service.terms import KeptTerms, OwnerRow, owner_rows
from scheduler.service.views.glance import stuck_loads
from scheduler.store.datastore import Fence, Store
from scheduler.store.keeper import Keeper
from scheduler.store.memory_store import MemoryStore
from scheduler.store.recovery import Recovered, recover
from scheduler.store.stored_records import CONFIGURATION, PolicyChoice
from scheduler.store.use_records import mark_lost, read_use, write_use
from scheduler.wire import caller_stream
from scheduler.wire.cluster_status import Status
from scheduler.wire.codec import pack
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens, addresses_for_token
from scheduler.wire.node_stream import node_of_path

log = logging.getLogger(__name__)

_EPOCH_S = 1_704_067_200  # 2024
# How long a lease's token may be presented for the first time: longer than any model loads.
_TOKEN_S = 600.0


@dataclass(frozen=True, slots=True)
class Health:
    """`ready`: callers are served, by this scheduler or by the leader that it names.

    A leader all of whose GPUs have loads that make no progress serves nobody who needs another
    load; without GPUs it waits for some. `stuck` names these loads, and those of some GPUs,
    or is their number.
    `store` is `memory`, `ok`, or `lost` (served from memory until it is back). A leader that is not
    `confirmed` cannot ask the datastore whether another scheduler was elected meanwhile.
    """

    ready: bool
    leading: bool
    confirmed: bool
    term: int | None
    leader: str | None
    store: str
    gpus: int
    stuck: tuple[str, ...] | int = ()

    def without_names(self) -> Self:
        """Return what everybody may see: names of models and functions are their tenants'."""
        return self if isinstance(self.stuck, int) else replace(self, stuck=len(self.stuck))


class SchedulerService:
    """Serves callers, people and nodes under one secret."""

    def __init__(
        self,
        settings: Settings,
        secret: bytes,
        name: str,
        url: str,
        recorder: RunRecorder | None = None,
        sink: Sink | None = None,
    ) -> None:
        """`sink` receives the spans of sampled requests."""
        self.name = name
        self.url = url
        self.settings = settings
        self._secret = secret
        self._recorder = recorder
        self._sink = sink
        self._tokens = LeaseTokens(secret)
        self._store: Store = MemoryStore()
        self._office: Office | None = None
        self.streams: NodeStreams | None = None
        self.leader: LeaderInfo | None = None
        self._candidacy: Leadership | None = None
        self._policy: PolicyInForce | None = None
        self._terms: KeptTerms | None = None
        self._keeper: Keeper | None = None
        self._met = 0
        self._billed_under: Fence | None = None
        self.meters = SchedulerCounters(settings.scheduler.metric_names)
        self.metrics = MetricsPage(self.meters, self._status, self._own, self._owners, sink).text
        self.access = ApiAccess(secret)
        self.leases = CallerLeases()
        self.callers: CallerStreams | None = None

    async def run(self, store: Store) -> None:
        """Campaign and lead, again and again, until cancelled; then hand over."""
        self._store = store
        lasts = not isinstance(store, MemoryStore)
        if not lasts:
            self._met = _seconds()  # a memory store does not keep the last term over a restart
        async with TaskGroup() as tasks:
            tasks.create_task(self._follow())
            while True:
                async with Leadership(
                    store, self.name, self.url, log, floor=self._met, leaps=lasts
                ) as candidacy:
                    async with standing_by(store, self.name, self.url, log):
                        await candidacy.campaign()
                    try:
                        await self._lead_after_election(candidacy, store)
                    except DatastoreError as error:
                        log.warning("%s gives up its term: %s", self.name, error)
                self._met = max(self._met, candidacy.term)

    async def _lead_after_election(self, candidacy: Leadership, store: Store) -> None:
        keep_s = self.settings.etcd.models_keep_s
        recovered = await recover(store, log, time.time() - keep_s)
        choice = recovered.begin_with(self._configured())
        billing = self.settings.billing
        buckets = UseBuckets(keep_days=billing.keep_days)
        await read_use(store, buckets, log)
        self._billed_under = candidacy.fence
        async with AsyncExitStack() as stack:
            office = await stack.enter_async_context(
                self.lead(candidacy.term, choice, recovered, candidacy, buckets)
            )
            if not isinstance(store, MemoryStore):
                await self._keep(office, candidacy, store, stack)
            assert self._policy is not None, "it leads"
            policy = follow_policy(store, self._policy, lambda: candidacy.fence, log)
            async with TaskGroup() as tasks:
                watching = watch_rivals(store, candidacy, term_at, log)
                beside = [tasks.create_task(work) for work in (policy, watching)]
                await candidacy.lost.wait()
                for task in beside:
                    task.cancel()

    async def _keep(
        self, office: Office, candidacy: Leadership, store: Store, stack: AsyncExitStack
    ) -> None:
        keeper = Keeper(
            office.core,
            office.clock,
            store,
            lambda: candidacy.fence,
            candidacy.doubt,
            log,
            self.settings.etcd.models_keep_s,
        )
        office.observers.append(keeper.touched)
        await stack.enter_async_context(keeper)
        self._keeper = keeper
        stack.callback(self._keep_no_more)

    def _keep_no_more(self) -> None:
        self._keeper = None

    @asynccontextmanager
    async def lead(
        self,
        term: int,
        choice: PolicyChoice | None = None,
        recovered: Recovered | None = None,
        candidacy: Leadership | None = None,
        buckets: UseBuckets | None = None,
    ) -> AsyncIterator[Office]:
        """Be the leader of this term for as long as the context lasts."""
        choice = choice or self._configured()
        settings = replace(self.settings, policy=choice.name, parameters=choice.parameters)
        lines = CallerLines(self.leases)
        office = Office(
            settings,
            term,
            self.meters,
            recovered,
            self._recorder,
            self._sink,
            buckets,
            lines.recall,
        )
        if candidacy is not None:
            candidacy.rises = office.rise

        def fenced(met: int) -> None:
            self._met = max(self._met, met)
            if candidacy is not None:
                candidacy.saw(met)

        streams = NodeStreams(
            *(office.driver, lambda: office.term, self._secret, log),
            fenced=fenced,
            now_s=office.clock.now_s,
        )
        self._office, self.streams, self._candidacy = office, streams, candidacy
        callers = CallerStreams(
            office, self.leases, lines, self.meters, self.signed, self._elsewhere, fenced
        )
        self.callers = callers
        self._policy = PolicyInForce(choice, office.decide_by)
        self._terms = KeptTerms(self._store, office.terms, partial(_fence_of, candidacy), log)
        log.info("%s decides by %s", self.name, choice.name)
        try:
            async with self._terms, office.bill.running(partial(self._write_bill, candidacy)):
                yield office
        finally:
            self._office = self.streams = self._candidacy = self._policy = self.callers = None
            self._terms = None
            await streams.close()
            office.close()
            await callers.close()

    async def _write_bill(self, candidacy: Leadership | None, buckets: UseBuckets) -> int:
        """Write the bill as long as this scheduler leads; returns the bytes."""
        fence = _fence_of(candidacy)
        if fence is None:
            return 0
        if fence != self._billed_under:  # a new term, or the datastore has lost its data
            await mark_lost(self._store, buckets)
            self._billed_under = fence
        return await write_use(self._store, buckets, fence)

    def _configured(self) -> PolicyChoice:
        return PolicyChoice(self.settings.policy, self.settings.parameters, CONFIGURATION)

    async def _follow(self) -> None:
        """Keep track of the leader, to refer callers to it."""
        reader = Leadership(self._store, self.name, self.url, log)
        async with aclosing(reader.leaders()) as leaders:
            async for leader in leaders:
                self.leader = leader if leader is not None and leader.term else None

    # -- for the application ----------------------------------------------------------------------

    def office(self) -> Office:
        """The leader's core, driver and history; NotLeading if this scheduler does not lead."""
        office = self._office
        if office is None:
            raise NotLeading(self._elsewhere())
        return office

    def signed(self, placement: Placement, request: Request) -> tuple[int, tuple[str, ...], str]:
        """What an answer has beside the placement: term, addresses and a signed token."""
        office = self.office()
        term, lease = office.term, office.core.placer.leases.get(placement.lease)
        addresses = self._addresses(placement.node)
        shared = lease is not None and lease.is_shared  # each of its requests shows its own token
        claims = LeaseClaims(
            lease=placement.lease,
            request=request.id,
            function=request.function,
            node=placement.node,
            gpu=placement.gpu,
            slot=placement.slot,
            term=term,
            expires_s=time.time() + _TOKEN_S,
            addresses=addresses_for_token(addresses),
            stands=placement.stands is not None,
            ahead=placement.hit and request.caller != "" and not shared,
        )
        return term, addresses, self._tokens.sign(claims)

    async def set_policy(self, policy: str, parameters: Mapping[str, float]) -> None:
        """Decide by this policy from now on, here and after a restart."""
        in_force = self._policy
        if in_force is None:
            raise NotLeading(self._elsewhere())
        await in_force.choose(self._store, policy, parameters)

    async def set_terms(self, owner: str, terms: OwnerTerms | None) -> None:
        """Put an owner's terms in force, here and after a restart; None: no longer."""
        if self._terms is None:
            raise NotLeading(self._elsewhere())
        await self._terms.set(owner, terms)

    def store_state(self) -> str:
        """The datastore's state in one word."""
        if isinstance(self._store, MemoryStore):
            return "memory"
        return "ok" if self._store.healthy else "lost"

    def health(self) -> Health:
        office, leader = self._office, self._elsewhere()
        gpus = () if office is None else tuple(office.core.cluster.gpus.values())
        serving = [gpu for gpu in gpus if gpu.active]
        all_stuck = bool(serving) and all(gpu.stuck for gpu in serving)
        return Health(
            ready=leader is not None if office is None else not all_stuck,
            leading=office is not None,
            confirmed=office is not None and self._confirmed(),
            term=None if office is None else office.term,
            leader=self.url if office is not None else leader,
            store=self.store_state(),
            gpus=len(gpus),
            stuck=() if office is None else _stuck(gpus, office.clock.now_s()),
        )

    async def serve_stream(self, request: StreamRequest, line: AcceptedLine) -> None:
        """Serve one line of frames: a GPU manager's stream, or a caller's."""
        node = node_of_path(request.path)
        if node is not None:
            await self._serve_node(node, line)
            return
        role = self.access.role(dict(request.headers).get(b"authorization", b""))
        if request.path != caller_stream.PATH or role is None:
            line.refuse()
        elif self.callers is None:
            line.send(pack(caller_stream.SentAway(self._elsewhere())))
            await line.flush()
        else:
            await self.callers.serve(line)

    async def _serve_node(self, node: NodeId, line: AcceptedLine) -> None:
        """A manager proves by its greeting who it is."""
        if self.streams is None:
            await turn_away(line, self._elsewhere())
        else:
            await self.streams.serve(line, node)

    def _confirmed(self) -> bool:
        return self._candidacy is None or self._candidacy.confirmed

    def _elsewhere(self) -> str | None:
        leader = self.leader
        return None if leader is None or leader.url == self.url else leader.url

    def _addresses(self, node: NodeId) -> tuple[str, ...]:
        """Where the node's GPU manager listens, by its own report."""
        return () if self.streams is None else self.streams.addresses(node)

    # -- metrics --------------------------------------------------------------------------------

    def _status(self) -> Status | None:
        return None if self._office is None else self._office.driver.status()

    def _owners(self) -> list[OwnerRow]:
        office, most = self._office, self.settings.scheduler.metric_names
        if office is None:
            return []
        return owner_rows(office.terms, office.core, office.clock.now_s(), most)

    def _own(self) -> dict[str, float]:
        health, keeper = self.health(), self._keeper
        return {
            declared.LEADING.name: float(health.leading),
            declared.TERM.name: float(health.term or 0),
            declared.CONFIRMED.name: float(health.confirmed),
            declared.STORE_BEHIND.name: 0.0 if keeper is None else keeper.behind_s,
            declared.STORE_UNWRITTEN.name: 0.0 if keeper is None else keeper.unwritten,
            declared.STORE_HEALTHY.name: float(health.store != "lost"),
        }


def _fence_of(candidacy: Leadership | None) -> Fence | None:
    """The fence for a leader's writes; without an election there is none."""
    return None if candidacy is None else candidacy.fence


def _stuck(gpus: Iterable[Gpu], now_s: float) -> tuple[str, ...]:
    return tuple(
        f"the load of {load.model} for {', '.join(load.functions) or 'nobody'} on {gpu.spec.id} of "
        f"node {gpu.spec.node} has made no progress for {now_s - load.since_s:.0f} s"
        for gpu in gpus
        for load in stuck_loads(gpu)
    )


def _seconds() -> int:
    """A term's floor that rises from start to start, for a store that keeps no term."""
    return int(time.time()) - _EPOCH_S
