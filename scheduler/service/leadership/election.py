"""Which of several schedulers leads: an election in the datastore, and the resulting term.

The leader holds the key `leader` under a lease that it refreshes. Terms rise by one with every
election, and are recorded in `election`, which outlives the leader.

A leader whose lease cannot be refreshed does not know whether the datastore is down or only
unreachable from here. It continues to lead, since only it holds the queue, until it learns of
another leader: from the datastore, once that answers again, or from a GPU manager that has met a
higher term. Another leader may be elected meanwhile, so the datastore's lease does not exclude two
leaders. Terms do: every GPU manager refuses orders of a lower term than the highest it has met.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from logging import Logger
from math import inf
from pathlib import Path
from typing import Self
from uuid import uuid4

import aiohttp
from msgspec import Struct, json
from msgspec.structs import replace

from common.numerals import natural
from common.time_limits import time_limit
from scheduler.model.errors import BadValue, DatastoreError, Fenced, LeaseGone, StoreUnavailable
from scheduler.store.datastore import Fence, Store, StoreLease
from scheduler.store.stored_records import key
from scheduler.store.stored_records import name as unquoted
from scheduler.wire.codec import encoded, read

LEADER = "leader"
ELECTION = "election"

LEASE_TTL_S = 3
_LEAP_BYTES = 2
_REFRESH_S = 1.0
_TRY_AGAIN_S = 0.5
# A leader notices within a second that the datastore is back.
_GIVE_WAY_S = 2.0


class LeaderInfo(Struct, frozen=True):
    """The leader's record; `id` is new with every candidacy, `process` may be empty."""

    name: str
    url: str
    term: int
    id: str
    process: str = ""


_LEADERS = json.Decoder(LeaderInfo)


class Leadership:
    """One candidacy: wait in `campaign`, lead until `lost` is set, then make a new candidacy.

    `async with` resigns at the end, so that the next scheduler leads at once. The term may rise
    while this scheduler leads: its lease expired and no other scheduler was elected. `rises` is
    called with the new term then.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        advertise_url: str,
        log: Logger,
        *,
        floor: int = 0,
        leaps: bool = False,
        rises: Callable[[int], None] = lambda _term: None,
    ) -> None:
        """The terms are above the `floor`; whether the first one of a datastore leaps beyond it."""
        self._store = store
        self._log = log
        process = name_of_this_process()
        self._me = LeaderInfo(name, advertise_url, floor, uuid4().hex, process)
        self._lease: StoreLease | None = None
        self.fence: Fence | None = None  # for the leader's writes; it changes when the term rises
        self._refreshing: asyncio.Task[None] | None = None
        self._doubted = asyncio.Event()
        self._seen_term = 0
        self._leaps = leaps
        self._back_s = -inf
        self._forget_health: Callable[[], None] = store.on_health_change(self._health_changed)
        self.confirmed = False
        self.lost = asyncio.Event()
        self._rises = rises

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.resign()

    @property
    def term(self) -> int:
        """The term of this leader; before the election, the highest term that it has met."""
        return self._me.term

    @property
    def leading(self) -> bool:
        """Whether this scheduler was elected, and has met no later leader since."""
        return self.fence is not None and not self.lost.is_set()

    async def campaign(self) -> int:
        """Wait until this scheduler leads; returns its term."""
        assert self.fence is None, "a candidacy is for one election"
        while not await self._elected():
            await asyncio.sleep(_TRY_AGAIN_S)
        self._refreshing = asyncio.create_task(self._refresh())
        return self.term

    async def resign(self) -> None:
        """Stop leading, and let another scheduler lead at once."""
        self.lost.set()
        self._forget_health()
        self._forget_health = lambda: None
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await self._give_lease_back()

    def saw(self, term: int) -> None:
        """A node or scheduler has met this term: if it is above ours, find out who leads.

        While the datastore does not answer, the higher term counts as another leader's. If the
        datastore answers that we lead, it has lost its data, and our term rises above the one met.
        """
        if term > self.term:
            self._seen_term = max(self._seen_term, term)
            self._doubted.set()

    def doubt(self) -> None:
        """A write was fenced off: find out at once who leads."""
        self._doubted.set()

    # -- being elected --------------------------------------------------------------------------

    async def _elected(self) -> bool:
        """Stand for election until elected; False if the datastore fails."""
        try:
            while not await self._stand():
                await self._wait_for_vacancy()
                await self._give_way()
        except (StoreUnavailable, LeaseGone, Fenced) as error:
            self._log.warning("no election: %s", error)
            await self._give_lease_back()
            return False
        return True

    async def _stand(self) -> bool:
        lease = self._lease = await self._store.grant(LEASE_TTL_S)
        revision = await self._store.create(LEADER, self._without_term(), lease)
        if revision is None:
            await self._give_lease_back()
            return False
        await self._take_office(lease, Fence(LEADER, revision))
        return True

    def _without_term(self) -> bytes:
        """With term 0 other schedulers do not treat this candidate as the leader yet."""
        return encoded(replace(self._me, term=0))

    async def _take_office(self, lease: StoreLease, fence: Fence) -> None:
        """Publish the new term: one above the highest term recorded or met.

        Without a record, which may be lost, nobody knows which terms others have had. Two leaders
        of one term would give leases the same ids; a leap by chance keeps them apart.
        """
        latest = decoded(await self._store.get(ELECTION))
        highest = max(0 if latest is None else latest.term, self.term, self._seen_term)
        leaps = latest is None and self._leaps
        leap = int.from_bytes(secrets.token_bytes(_LEAP_BYTES), "big") if leaps else 0
        me = replace(self._me, term=highest + leap + 1)
        await self._store.write({ELECTION: encoded(me)}, fence=fence)
        await self._store.write({LEADER: encoded(me)}, fence=fence, lease=lease)
        self._me, self._lease, self.fence = me, lease, fence
        self.confirmed = True
        self._log.info("%s leads in term %d", me.name, me.term)
        self._rises(me.term)

    async def _wait_for_vacancy(self) -> None:
        async with aclosing(self._store.watch(LEADER)) as watch:
            async for changes in watch:
                value = changes.values.get(LEADER)
                if value is None and (changes.complete or LEADER in changes.values):
                    return
                leader = decoded(value)
                if value is not None and leader is not None:
                    self._me = replace(self._me, term=max(self.term, leader.term))
                    if has_ended(leader.process):
                        await self._depose(leader, value)

    async def _give_way(self) -> None:
        """After an outage of the datastore all its leases expired: let the old leader return."""
        back_s = asyncio.get_running_loop().time() - self._back_s
        if not self._store.healthy or back_s < _GIVE_WAY_S:
            await asyncio.sleep(_GIVE_WAY_S)

    def _health_changed(self, healthy: bool) -> None:  # noqa: FBT001  # the port's callback
        if healthy:
            self._back_s = asyncio.get_running_loop().time()

    async def _depose(self, leader: LeaderInfo, record: bytes) -> None:
        """Delete the record of a leader on this machine whose process was killed.

        The record of another leader, elected in between, stays.
        """
        self._log.info("the process of %s has ended without resigning", leader.name)
        await self._store.delete(LEADER, record)

    # -- staying the leader -----------------------------------------------------------------------

    async def _refresh(self) -> None:
        while not self.lost.is_set():
            with suppress(TimeoutError):
                async with time_limit(_REFRESH_S):
                    await self._doubted.wait()
            try:
                await self._stay()
            except (StoreUnavailable, LeaseGone, Fenced) as error:
                self._lead_without_store(str(error))
            except DatastoreError as error:
                self._lose(str(error))

    def _lead_without_store(self, why: str) -> None:
        """The datastore does not answer: it is down, or unreachable from here."""
        if self._seen_term > self.term:
            self._lose(f"term {self._seen_term} has begun")
        elif self.confirmed:
            self._log.warning("%s continues to lead without the datastore: %s", self._me.name, why)
            self.confirmed = False

    async def _stay(self) -> None:
        """Refresh the lease; if the lease or the key is gone, try to be elected again.

        The key may go without the lease: the datastore may be restored from an older state.
        """
        alive = self._lease is not None and await self._store.refresh(self._lease)
        holder = decoded(await self._store.get(LEADER))
        if not alive or holder is None or (holder.id, holder.term) != (self._me.id, self.term):
            await self._regain()
        elif self._seen_term > self.term:
            assert self._lease is not None
            assert self.fence is not None
            await self._take_office(self._lease, self.fence)
        self._doubted.clear()
        self.confirmed = not self.lost.is_set()

    async def _regain(self) -> None:
        """Be elected again, unless another scheduler was elected meanwhile."""
        await self._give_lease_back()
        lease = self._lease = await self._store.grant(LEASE_TTL_S)
        revision = await self._store.create(LEADER, self._without_term(), lease)
        latest = decoded(await self._store.get(LEADER if revision is None else ELECTION))
        if latest is not None and latest.id != self._me.id:
            await self._give_lease_back()
            self._lose("another scheduler was elected")
        elif revision is None:
            raise StoreUnavailable("the key of an earlier attempt remains until its lease expires")
        else:
            await self._take_office(lease, Fence(LEADER, revision))

    def _lose(self, why: str) -> None:
        if not self.lost.is_set():
            self._log.warning("%s no longer leads: %s", self._me.name, why)
            self.lost.set()
            self.confirmed = False

    async def _give_lease_back(self) -> None:
        """Revoke the lease so that its key does not block an election until it expires."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(DatastoreError):
                await self._store.revoke(lease)


async def leaders(store: Store) -> AsyncGenerator[LeaderInfo | None, None]:
    """The leader that the datastore records, then every change of leader."""
    async with aclosing(store.watch(LEADER)) as watch:
        async for changes in watch:
            if changes.complete or LEADER in changes.values:
                leader = decoded(changes.values.get(LEADER))
                if leader is None or leader.term:
                    yield leader


def decoded(value: bytes | None) -> LeaderInfo | None:
    """The leader of this record; None without a record, or if it is invalid."""
    if value is None:
        return None
    try:
        return read(_LEADERS, value)
    except BadValue:
        return None


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def name_of_this_process() -> str:
    """The machine's boot id, the namespace of process ids (a container's), and the process id."""
    return f"{_space()}/{os.getpid()}"


def has_ended(process: str) -> bool:
    """Whether the process of this name is known to have ended; False in any doubt."""
    space, _, number = process.rpartition("/")
    pid = natural(number)
    if not space or space != _space() or not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # another user's process, or no process id
        return False
    return False


def _space() -> str:
    """Equal for all processes that see each other's process ids; "" if unknown."""
    with suppress(OSError):
        return f"{_BOOT.read_text().strip()}/{_NAMESPACE.readlink()}"
    return ""


# The other schedulers: known from the datastore, and asked directly while it does not answer.
#
# A leader that cannot reach the datastore cannot know whether another scheduler was elected. GPU
# managers could report a new leader, but those attached to this leader have met none. So the
# leader asks the schedulers that stood by when it last reached the datastore.

CANDIDATES = "candidates/"

_TTL_S = 10
_LISTED_AGAIN_S = 3.0
_LOOK_S = 1.0


# The term in which the scheduler at this URL leads; 0 if it does not lead or does not answer.
Ask = Callable[[str], Awaitable[int]]


@asynccontextmanager
async def standing_by(store: Store, name: str, url: str, log: Logger) -> AsyncIterator[None]:
    """Keep this scheduler listed in the datastore as a candidate."""
    task = asyncio.create_task(_stay_known(store, name, url, log))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with suppress(DatastoreError):
            await store.delete(key(CANDIDATES, url))


async def watch_rivals(store: Store, leadership: Leadership, ask: Ask, log: Logger) -> None:
    """While this scheduler leads: find out if another one leads, also without the datastore."""
    urls: list[str] = []
    while True:
        if leadership.confirmed:
            with suppress(DatastoreError):
                urls = [unquoted(CANDIDATES, k) for k in (await store.list(CANDIDATES)).values]
        else:
            for term in await asyncio.gather(*map(ask, urls)):
                if term > leadership.term:
                    log.warning("another scheduler leads, in term %d", term)
                    leadership.saw(term)
        await asyncio.sleep(_LOOK_S)


async def _stay_known(store: Store, name: str, url: str, log: Logger) -> None:
    lease: StoreLease | None = None
    record = encoded({"name": name, "url": url})
    while True:
        try:
            if lease is None or not await store.refresh(lease):
                granted = await store.grant(_TTL_S)
                await store.put(key(CANDIDATES, url), record, granted)
                lease = granted
        except DatastoreError as error:
            log.debug("not listed as a candidate: %s", error)
        await asyncio.sleep(_LISTED_AGAIN_S)


_PATIENCE_S = 1.0


async def term_at(url: str) -> int:
    """The term in which the scheduler at this URL leads; 0 if it does not lead or answer."""
    patience = aiohttp.ClientTimeout(total=_PATIENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=patience) as session,
            session.get(url.rstrip("/") + "/readyz") as answer,
        ):
            health = await answer.json()
        return int(health["term"]) if health["leading"] else 0
    except Exception:  # noqa: BLE001 - anyone's key names a URL, and anyone may answer there
        return 0
