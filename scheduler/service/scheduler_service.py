"""One scheduler process: campaigns, serves while it leads, and else names the leader to callers."""

import logging
import time
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, TypeVar

from common.http.server_protocol import AcceptedLine
from common.stream_upgrade import StreamRequest
from common.telemetry.metrics import Metric
from common.telemetry.traces import NO_COUNTS, Sink
from scheduler.api import Placement
from scheduler.cluster.slots import Gpu
from scheduler.features.billing.bill import Bill
from scheduler.features.hooks import TermFeature, TermParts
from scheduler.features.tenants.quotas import Quotas
from scheduler.model.errors import DatastoreError, NotLeading
from scheduler.model.values import Request
from scheduler.service.access import ApiAccess
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.leadership.election import (
    LeaderInfo,
    Leadership,
    leaders,
    standing_by,
    term_at,
    watch_rivals,
)
from scheduler.service.leadership.policy_in_force import PolicyInForce
from scheduler.service.leadership.term import Office
from scheduler.service.metrics import declared
from scheduler.service.metrics.counting import SchedulerCounters
from scheduler.service.metrics.gauges import metrics_page
from scheduler.service.page_feed import PageFeed, waiting_functions
from scheduler.service.streams.callers import CallerLeases, CallerStreams
from scheduler.service.streams.nodes import NodeStreams, turn_away
from scheduler.settings import Settings
from scheduler.store.datastore import Fence, Store
from scheduler.store.keeper import Keeper
from scheduler.store.memory_store import MemoryStore
from scheduler.store.recovery import Recovered, recover
from scheduler.store.stored_records import CONFIGURATION, PolicyChoice
from scheduler.wire.caller_stream import PATH, Granted, SentAway
from scheduler.wire.codec import pack
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens, addresses_for_token
from scheduler.wire.node_stream import node_of_path

log = logging.getLogger(__name__)

# What a leader can do without: each is a folder that may leave, with its import and its name here.
FEATURES: Sequence[type[TermFeature]] = (Bill, Quotas)
METRICS: Sequence[Metric] = (
    *declared.METRICS,
    *(metric for kind in FEATURES for metric in (*kind.counters, *kind.gauges)),
)

_Feature = TypeVar("_Feature", bound=TermFeature)
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


@dataclass(frozen=True, slots=True)
class Reign:
    """What serves during one term of this scheduler; without an election there is no candidacy."""

    office: Office
    candidacy: Leadership | None
    streams: NodeStreams
    callers: CallerStreams
    policy: PolicyInForce
    feed: PageFeed
    keeper: Keeper | None


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
        self._met = 0
        self.leader: LeaderInfo | None = None
        self.reign: Reign | None = None
        self.meters = SchedulerCounters(
            settings.scheduler.metric_names, [m for kind in FEATURES for m in kind.counters]
        )
        self.access = ApiAccess(secret)
        self.leases = CallerLeases()

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
                    *(store, self.name, self.url, log),
                    floor=self._met,
                    leaps=lasts,
                    rises=self._rise,
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
        async with self.lead(candidacy.term, candidacy, recovered):
            assert self.reign is not None, "it leads"
            async with TaskGroup() as tasks:
                watching = watch_rivals(store, candidacy, term_at, log)
                beside = [
                    tasks.create_task(work) for work in (self.reign.policy.follow(), watching)
                ]
                await candidacy.lost.wait()
                for task in beside:
                    task.cancel()

    @asynccontextmanager
    async def lead(
        self,
        term: int,
        candidacy: Leadership | None = None,
        recovered: Recovered | None = None,
    ) -> AsyncIterator[Office]:
        """Be the leader of this term for as long as the context lasts."""
        recovered = recovered or Recovered()
        settings = self.settings
        configured = PolicyChoice(settings.policy, settings.parameters, CONFIGURATION)
        choice = recovered.begin_with(configured)
        settings = replace(settings, policy=choice.name, parameters=choice.parameters)
        office = Office(
            *(settings, term, self.meters, recovered, self._recorder, self._sink),
            recall=self.leases.recall,
        )
        reign = self._reign(office, candidacy, choice)
        log.info("%s decides by %s", self.name, choice.name)
        try:
            async with AsyncExitStack() as running:
                for feature in office.features:
                    await running.enter_async_context(feature.running())
                if reign.keeper is not None:
                    await running.enter_async_context(reign.keeper)
                if candidacy is not None and candidacy.term > term:  # since features began to read
                    office.rise(candidacy.term)
                office.begin_grace()
                self.reign = reign
                yield office
        finally:
            self.reign = None
            await reign.streams.close()
            office.close()
            await reign.callers.close()

    def _reign(self, office: Office, candidacy: Leadership | None, choice: PolicyChoice) -> Reign:
        fence = partial(_fence_of, candidacy)
        fenced = partial(self._fenced, candidacy)
        parts = TermParts(
            settings=self.settings,
            core=office.core,
            now_s=office.clock.now_s,
            report=office.driver.report,
            store=self._store,
            fence=fence,
            counts=self.meters.values,
            functions=self.meters.functions,
            log=log,
        )
        office.features.extend(kind(parts) for kind in FEATURES)
        return Reign(
            office,
            candidacy,
            NodeStreams(
                *(office.driver, lambda: office.term, self._secret, log),
                fenced=fenced,
                now_s=office.clock.now_s,
            ),
            CallerStreams(office, self.leases, self.meters, self.grant, self.elsewhere, fenced),
            PolicyInForce(choice, office.decide_by, self._store, fence, log),
            PageFeed(office),
            self._keeper(office, candidacy),
        )

    def _keeper(self, office: Office, candidacy: Leadership | None) -> Keeper | None:
        """Writes the state of this term, if there is a datastore that lasts."""
        if candidacy is None or isinstance(self._store, MemoryStore):
            return None
        keep_s = self.settings.etcd.models_keep_s
        keeper = Keeper(
            *(office.core, office.clock, self._store, lambda: candidacy.fence),
            *(candidacy.doubt, log, keep_s),
        )
        office.observers.append(keeper.touched)
        return keeper

    def _rise(self, term: int) -> None:
        if self.reign is not None:
            self.reign.office.rise(term)

    def _fenced(self, candidacy: Leadership | None, met: int) -> None:
        """A node or a caller has met this term, which is above ours."""
        self._met = max(self._met, met)
        if candidacy is not None:
            candidacy.saw(met)

    async def _follow(self) -> None:
        """Keep track of the leader, to refer callers to it."""
        async with aclosing(leaders(self._store)) as changes:
            async for leader in changes:
                self.leader = leader

    # -- for the application ----------------------------------------------------------------------

    def office(self) -> Office:
        """The leader's core, driver and history; NotLeading if this scheduler does not lead."""
        return self.reigning().office

    def reigning(self) -> Reign:
        """What serves in this term; NotLeading if this scheduler does not lead."""
        if self.reign is None:
            raise NotLeading(self.elsewhere())
        return self.reign

    def grant(
        self, caller: str, placement: Placement, request: Request, question: int = 0
    ) -> Granted:
        """The answer to a caller, which has this lease from now on; NotLeading after the term."""
        reign = self.reigning()
        office = reign.office
        term, lease = office.term, office.core.leases.get(placement.lease)
        addresses = reign.streams.addresses.get(placement.node, ())
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
        self.leases.granted(office, caller, placement.lease, request.id)
        return Granted(question, placement, term, addresses, self._tokens.sign(claims))

    async def set_policy(self, policy: str, parameters: Mapping[str, float]) -> None:
        """Decide by this policy from now on, here and after a restart."""
        await self.reigning().policy.choose(policy, parameters)

    def feature(self, kind: type[_Feature]) -> _Feature:
        """This feature in this term; NotLeading if this scheduler does not lead."""
        return self.office().feature(kind)

    def store_state(self) -> str:
        """The datastore's state in one word."""
        if isinstance(self._store, MemoryStore):
            return "memory"
        return "ok" if self._store.healthy else "lost"

    def health(self) -> Health:
        reign, leader = self.reign, self.elsewhere()
        if reign is None:
            return Health(leader is not None, False, False, None, leader, self.store_state(), 0)
        office, candidacy = reign.office, reign.candidacy
        gpus = tuple(office.core.cluster.gpus.values())
        serving = [gpu for gpu in gpus if gpu.active]
        return Health(
            ready=not serving or not all(gpu.stuck for gpu in serving),
            leading=True,
            confirmed=candidacy is None or candidacy.confirmed,
            term=office.term,
            leader=self.url,
            store=self.store_state(),
            gpus=len(gpus),
            stuck=_stuck(gpus, office.clock.now_s()),
        )

    async def serve_stream(self, request: StreamRequest, line: AcceptedLine) -> None:
        """Serve one line of frames: a GPU manager's stream, or a caller's."""
        reign, node = self.reign, node_of_path(request.path)
        if node is not None:  # a manager proves by its greeting who it is
            if reign is None:
                await turn_away(line, self.elsewhere())
            else:
                await reign.streams.serve(line, node)
            return
        role = self.access.role(dict(request.headers).get(b"authorization", b""))
        if request.path != PATH or role is None:
            line.refuse()
        elif reign is None:
            line.send(pack(SentAway(self.elsewhere())))
            await line.flush()
        else:
            await reign.callers.serve(line)

    def elsewhere(self) -> str | None:
        """The URL of the leader, if another scheduler leads."""
        leader = self.leader
        return None if leader is None or leader.url == self.url else leader.url

    # -- metrics --------------------------------------------------------------------------------

    def metrics(self) -> bytes:
        """The answer to a scrape."""
        reign, health = self.reign, self.health()
        keeper = None if reign is None else reign.keeper
        own = {
            declared.LEADING: float(health.leading),
            declared.TERM: float(health.term or 0),
            declared.CONFIRMED: float(health.confirmed),
            declared.STORE_BEHIND: 0.0 if keeper is None else keeper.behind_s,
            declared.STORE_UNWRITTEN: 0.0 if keeper is None else keeper.unwritten,
            declared.STORE_HEALTHY: float(health.store != "lost"),
            declared.STARTED: self.meters.started_unix_s,
        }
        spans = NO_COUNTS if self._sink is None else self._sink.counts()
        if reign is None:
            return metrics_page(own, spans, self.meters, None, ())
        office = reign.office
        more = [family for feature in office.features for family in feature.families()]
        return metrics_page(own, spans, self.meters, office.driver.status(), more)


def _fence_of(candidacy: Leadership | None) -> Fence | None:
    """The fence for a leader's writes; without an election there is none."""
    return None if candidacy is None else candidacy.fence


def _stuck(gpus: Iterable[Gpu], now_s: float) -> tuple[str, ...]:
    return tuple(
        f"the load of {model} for {', '.join(waiting_functions(gpu, model)) or 'nobody'} on "
        f"{gpu.spec.id} of node {gpu.spec.node} has made no progress for {now_s - since_s:.0f} s"
        for gpu in gpus
        for model, since_s in gpu.stuck.items()
    )


def _seconds() -> int:
    """A term's floor that rises from start to start, for a store that keeps no term."""
    return int(time.time()) - _EPOCH_S
