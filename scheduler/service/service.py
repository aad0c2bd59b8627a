"""One scheduler process: it campaigns, and while it leads it works; otherwise it says who does."""

import logging
import time
from asyncio import TaskGroup, get_running_loop
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.websockets import WebSocket

from cache_manager.model import NodeId
from scheduler.adapters.asking import term_at
from scheduler.adapters.store_memory import MemoryStore
from scheduler.api import Placement
from scheduler.errors import NotLeading, StoreError
from scheduler.leases import LeaseClaims, LeaseTokens, addresses_for_token
from scheduler.model import Request
from scheduler.ports import Store
from scheduler.service import declared
from scheduler.service.access import Access
from scheduler.service.app import Asgi, make_app
from scheduler.service.facts import Facts
from scheduler.service.health import Health
from scheduler.service.keeper import Keeper
from scheduler.service.leader import LeaderInfo, Leadership
from scheduler.service.metrics import Meters
from scheduler.service.nodes import NodeStreams, turn_away
from scheduler.service.office import Office
from scheduler.service.policy import InForce, follow_policy
from scheduler.service.recorder import Recorder
from scheduler.service.records import PolicyChoice
from scheduler.service.recovery import Recovered, recover
from scheduler.service.rivals import standing_by, watch_rivals
from scheduler.service.settings import Settings
from scheduler.status import Status
from scheduler.traces import Sink

log = logging.getLogger(__name__)

_EPOCH_S = 1_704_067_200  # 2024


class Service:
    """Serves callers, people and nodes under one secret."""

    def __init__(
        self,
        settings: Settings,
        secret: bytes,
        name: str,
        url: str,
        recorder: Recorder | None = None,
        sink: Sink | None = None,
    ) -> None:
        """`sink` is told of the traces of requests, where it is given."""
        self.name = name
        self.url = url
        self._settings = settings
        self._secret = secret
        self._recorder = recorder
        self._sink = sink
        self._tokens = LeaseTokens(secret)
        self._store: Store = MemoryStore()
        self._office: Office | None = None
        self._streams: NodeStreams | None = None
        self._leader: LeaderInfo | None = None
        self._candidacy: Leadership | None = None
        self._policy: InForce | None = None
        self._keeper: Keeper | None = None
        self._met = 0
        self.meters = Meters(settings.scheduler.metric_names)
        self.metrics = Facts(self.meters, self._status, self._own, sink).text
        guarded = settings.scheduler.metrics_auth
        self.app: Asgi = make_app(self, Access(secret), self.meters, metrics_auth=guarded)

    async def run(self, store: Store) -> None:
        """Campaign and lead, again and again, until this is cancelled; then hand over."""
        self._store = store
        if isinstance(store, MemoryStore):
            self._met = _seconds()  # nothing else remembers the last term from start to start
        async with TaskGroup() as tasks:
            tasks.create_task(self._follow())
            while True:
                async with Leadership(
                    store, self.name, self.url, log, floor=self._met
                ) as candidacy:
                    async with standing_by(store, self.name, self.url, log):
                        await candidacy.campaign()
                    try:
                        await self._lead_on(candidacy, store)
                    except StoreError as error:
                        log.warning("%s gives up its term: %s", self.name, error)
                self._met = max(self._met, candidacy.term)

    async def _lead_on(self, candidacy: Leadership, store: Store) -> None:
        """From the election until somebody else leads."""
        keep_s = self._settings.etcd.models_keep_s
        recovered = await recover(store, log, time.time() - keep_s)
        choice = recovered.begin_with(self._configured())
        async with AsyncExitStack() as stack:
            office = await stack.enter_async_context(
                self.lead(candidacy.term, choice, recovered, candidacy)
            )
            if not isinstance(store, MemoryStore):
                await self._keep(office, candidacy, store, stack)
            assert self._policy is not None, "it leads"
            policy = follow_policy(store, self._policy, lambda: candidacy.fence, log)
            async with TaskGroup() as tasks:
                watching = watch_rivals(store, candidacy, term_at, log)
                beside = [tasks.create_task(each) for each in (policy, watching)]
                await candidacy.lost.wait()
                for task in beside:
                    task.cancel()

    async def _keep(
        self, office: Office, candidacy: Leadership, store: Store, stack: AsyncExitStack
    ) -> None:
        """Write everything through, for as long as the stack lasts."""
        keeper = Keeper(
            office.core,
            office.clock,
            store,
            lambda: candidacy.fence,
            candidacy.doubt,
            log,
            self._settings.etcd.models_keep_s,
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
    ) -> AsyncIterator[Office]:
        """Be the leader of this term for as long as the context lasts."""
        choice = choice or self._configured()
        settings = replace(self._settings, policy=choice.name, parameters=choice.parameters)
        loop, recorder = get_running_loop(), self._recorder
        office = Office(settings, term, loop, self.meters, recovered, recorder, self._sink)
        if candidacy is not None:
            office.rises_with(lambda: candidacy.term)

        def fenced(met: int) -> None:
            self._met = max(self._met, met)
            if candidacy is not None:
                candidacy.saw(met)

        streams = NodeStreams(office.driver, lambda: office.term, self._secret, log, fenced=fenced)
        self._office, self._streams, self._candidacy = office, streams, candidacy
        self._policy = InForce(choice, office.decide_by)
        log.info("%s decides by %s", self.name, choice.name)
        try:
            yield office
        finally:
            self._office = self._streams = self._candidacy = self._policy = None
            await streams.close()
            office.close()

    def _configured(self) -> PolicyChoice:
        return PolicyChoice(self._settings.policy, self._settings.parameters)

    async def _follow(self) -> None:
        """Know who leads, to tell callers that come to us."""
        reader = Leadership(self._store, self.name, self.url, log)
        async with aclosing(reader.leaders()) as found:
            async for leader in found:
                self._leader = leader if leader is not None and leader.term else None

    # -- what the application asks ----------------------------------------------------------------

    def office(self) -> Office:
        """What the leader works with; NotLeading where this is not the leader."""
        office = self._office
        if office is None:
            raise NotLeading(self._elsewhere())
        return office

    def told(self, placement: Placement, request: Request) -> dict[str, Any]:
        """What a caller must know beside the placement: addresses, and a signed token."""
        term = self.office().term
        addresses = self._addresses(placement.node)
        claims = LeaseClaims(
            lease=placement.lease,
            request=request.id,
            function=request.function,
            node=placement.node,
            gpu=placement.gpu,
            slot=placement.slot,
            term=term,
            expires_s=time.time() + self._settings.scheduler.token_s,
            addresses=addresses_for_token(addresses),
        )
        return {
            "term": term,
            "addresses": addresses,
            "token": self._tokens.sign(claims),
        }

    async def set_policy(self, policy: str, parameters: Mapping[str, float]) -> None:
        """Decide by this policy from now on, here and after a restart."""
        in_force = self._policy
        if in_force is None:
            raise NotLeading(self._elsewhere())
        await in_force.choose(self._store, policy, parameters)

    def store_state(self) -> str:
        """In a word, how the datastore is."""
        if isinstance(self._store, MemoryStore):
            return "memory"
        return "ok" if self._store.healthy else "lost"

    def health(self) -> Health:
        """Whether it could answer a caller."""
        office, leader = self._office, self._elsewhere()
        return Health(
            ready=office is not None or leader is not None,
            leading=office is not None,
            confirmed=office is not None and self._confirmed(),
            term=None if office is None else office.term,
            leader=self.url if office is not None else leader,
            store=self.store_state(),
            gpus=0 if office is None else len(office.core.cluster.gpus),
        )

    async def node_stream(self, websocket: WebSocket) -> None:
        """Serve one GPU manager's stream."""
        if self._streams is None:
            await turn_away(websocket, self._elsewhere())
        else:
            await self._streams.serve(websocket)

    def _confirmed(self) -> bool:
        return self._candidacy is None or self._candidacy.confirmed

    def _elsewhere(self) -> str | None:
        """The URL of another scheduler that leads."""
        leader = self._leader
        return None if leader is None or leader.url == self.url else leader.url

    def _addresses(self, node: NodeId) -> tuple[str, ...]:
        """Where the node's GPU manager listens, as it said itself."""
        return () if self._streams is None else self._streams.addresses(node)

    # -- metrics --------------------------------------------------------------------------------

    def _status(self) -> Status | None:
        return None if self._office is None else self._office.driver.status()

    def _own(self) -> dict[str, float]:
        health = self.health()
        return {
            declared.LEADING.name: float(health.leading),
            declared.TERM.name: float(health.term or 0),
            declared.CONFIRMED.name: float(health.confirmed),
            declared.STORE_BEHIND.name: 0.0 if self._keeper is None else self._keeper.behind_s,
            declared.STORE_HEALTHY.name: float(health.store != "lost"),
        }


def _seconds() -> int:
    """Rises from one start to the next, where nothing remembers the last term: see `run`."""
    return int(time.time()) - _EPOCH_S
