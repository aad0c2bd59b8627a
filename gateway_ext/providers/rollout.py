"""How one version of a function follows another: side by side until the new one is ready."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gateway_ext.errors import GatewayError
from gateway_ext.model import Deployment, Endpoint
from gateway_ext.ports import Listener
from gateway_ext.providers.replica import Instance, Replica

log = logging.getLogger(__name__)


class Version(Protocol):
    """Replicas that all run the same, as many as are wanted."""

    replicas: list[Replica[Any]]

    @property
    def deployment(self) -> Deployment:
        """What they run."""
        ...

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """Where it can be called now."""
        ...

    @property
    def trouble(self) -> str:
        """What is amiss with one of them, if anything is."""
        ...

    def resize(self, wanted: int) -> Sequence[Replica[Any]]:
        """Has this many replicas; gives those that are too many, which get no new call."""
        ...


V = TypeVar("V", bound=Version)
_V_contra = TypeVar("_V_contra", bound=Version, contravariant=True)


class Owner(Protocol[_V_contra]):
    """A function whose versions these are."""

    @property
    def deployment(self) -> Deployment:
        """What is wanted now."""
        ...

    @property
    def wanted(self) -> int:
        """So many replicas."""
        ...

    def say(self, text: str) -> None:
        """Something about how it comes about, for its log."""
        ...

    def followed(self, version: _V_contra) -> None:
        """This version has taken over from the one before it."""
        ...

    def left(self, version: _V_contra) -> None:
        """Instances of a version have ended, perhaps its last ones."""
        ...


class Rollout(Generic[V]):
    """The version that serves and the one that is to follow."""

    def __init__(self, owner: Owner[V], listener: Listener, drain_s: float) -> None:
        self.current: V | None = None
        self.coming: V | None = None
        self._owner = owner
        self._listener = listener
        self._drain_s = drain_s
        self._failed = ""  # why there are no instances to speak of
        self._stopped = False
        self._changed = asyncio.Event()
        self._bringing: asyncio.Task[None] | None = None
        self._retiring: dict[asyncio.Task[None], V] = {}

    def begin(self, make: Callable[[], Awaitable[V]]) -> None:
        """Bring another version about; what runs goes on until that is ready."""
        before = self._bringing
        if self.current is None:
            self.tell()
        self._bringing = asyncio.create_task(self._bring(make, before))
        self._bringing.add_done_callback(self._brought)

    def start_with(self, version: V) -> None:
        """This one serves from the start: some of it may run already."""
        leaving = version.resize(self._owner.wanted)
        self.current = version
        self.tell()
        self._end_surplus(leaving, version)

    def resize(self) -> None:
        """Another number of replicas is wanted."""
        leaving = [(one.resize(self._owner.wanted), one) for one in self.versions]
        self.tell()
        for replicas, version in leaving:
            self._retire(replicas, version)
        self._changed.set()

    def hindered(self, why: str) -> None:
        """A version is not there yet, and is still being made; until it is, this is amiss."""
        self._failed = why
        self._owner.say(why)
        log.warning("%s: %s", self._owner.deployment.id, why)

    async def stop(self, *, drain: bool) -> None:
        """End every instance; with `drain` calls in flight may end before."""
        await self._stop_bringing()
        leaving = [replica for one in self.versions for replica in one.resize(0)]
        self.current = self.coming = None
        for task in list(self._retiring) if not drain else ():
            task.cancel()
        await self._leave(leaving, drain=drain)
        if self._retiring:
            await asyncio.wait(list(self._retiring))

    async def let_go(self) -> None:
        """Bring nothing about any more, and leave instances to themselves."""
        await self._stop_bringing()
        for task in list(self._retiring):
            task.cancel()
        await asyncio.gather(*(one.let_go() for v in self.versions for one in v.replicas))
        if self._retiring:
            await asyncio.wait(list(self._retiring))

    @property
    def versions(self) -> list[V]:
        """Those that have, or are to have, instances that take calls."""
        return [one for one in (self.current, self.coming) if one is not None]

    @property
    def present(self) -> list[V]:
        """Those that something runs of."""
        return [*self.versions, *self._retiring.values()]

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way in or out."""
        return not self._retiring and self.coming is None

    @property
    def available(self) -> int:
        """Replicas that can be called."""
        return len(self.current.endpoints) if self.current else 0

    @property
    def trouble(self) -> str:
        """What is amiss, if anything is."""
        if self._failed:
            return self._failed
        coming = self.coming.trouble if self.coming else ""
        return coming or (self.current.trouble if self.current else "")

    def changed(self) -> None:
        """An instance became ready, or is so no longer."""
        self._changed.set()
        if not self._stopped:
            self.tell()

    def tell(self) -> None:
        """Have the listener know."""
        current, wanted = self.current, self._owner.wanted
        if current is None:
            self._listener.function_is(self._owner.deployment, [], wanted=wanted)
        else:
            self._listener.function_is(current.deployment, current.endpoints, wanted=wanted)

    async def _stop_bringing(self) -> None:
        self._stopped = True
        if self._bringing is not None:
            self._bringing.cancel()
            await asyncio.wait([self._bringing])

    async def _bring(
        self, make: Callable[[], Awaitable[V]], before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
        if self.coming is not None:
            self._abandon(self.coming)
        self._failed = ""
        try:
            coming = await make()
        except (GatewayError, OSError) as error:
            self.hindered(str(error))
            self.tell()
            return
        self._failed = ""
        leaving = coming.resize(self._owner.wanted)
        if self.current is None:
            self.current = coming
            self.tell()
            self._end_surplus(leaving, coming)
            return
        self.coming = coming
        self._end_surplus(leaving, coming)
        await self._until_ready(coming)
        self._swap(self.current, coming)

    def _brought(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = f"it could not be started: {error}"
            log.error("%s could not be started", self._owner.deployment.id, exc_info=error)

    async def _until_ready(self, coming: V) -> None:
        while len(coming.endpoints) < self._owner.wanted:
            self._changed.clear()
            await self._changed.wait()

    def _swap(self, old: V, coming: V) -> None:
        self.current, self.coming = coming, None
        leaving = old.resize(0)
        self.tell()
        self._retire(leaving, old)  # first, so that it ends whatever becomes of what follows
        self._owner.followed(coming)

    def _abandon(self, coming: V) -> None:
        """Another version is wanted before this one was ready."""
        self.coming = None
        self._retire(coming.resize(0), coming)

    def _end_surplus(self, leaving: Sequence[Replica[Any]], version: V) -> None:
        if leaving:
            self._retire(leaving, version)

    def _retire(self, leaving: Sequence[Replica[Any]], version: V) -> None:
        task = asyncio.create_task(self._leave(leaving, drain=True))
        self._retiring[task] = version
        task.add_done_callback(self._retired)

    def _retired(self, task: asyncio.Task[None]) -> None:
        version = self._retiring.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: instances were not ended well", version.deployment.id, exc_info=error)
        if not self._stopped:
            self._owner.left(version)

    async def _leave(self, leaving: Iterable[Replica[Any]], *, drain: bool) -> None:
        replicas = list(leaving)
        instances: list[Instance] = [one.instance for one in replicas if one.instance is not None]
        try:
            if drain and instances:
                names = [one.name for one in instances]
                await self._listener.drained(names, self._drain_s)
        finally:
            await asyncio.gather(*(replica.stop() for replica in replicas))
