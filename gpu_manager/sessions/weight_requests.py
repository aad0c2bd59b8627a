"""Handles a session's requests about weights: offer, proof, upload, forget."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from cache_manager.model.ids import MIB, ModelId, Tier
from gpu_manager.errors import ClientNotAllowed, UnknownImage
from gpu_manager.node.stepping_down import StoredWeights
from gpu_manager.node.tenant_models import Catalogue, TenantModel
from gpu_manager.sessions.sessions import ClientSession, in_thread
from gpu_manager.weights.sealed_images import WeightsUpload, read_sizes
from gpu_manager.weights.store import WeightStore
from scheduler.api import ModelRegistered, ModelSpec, NodeReports
from torch_shim.errors import BadFrame
from torch_shim.wire.image_digests import ImageTable
from torch_shim.wire.messages import Chunk, Prove, Upload
from torch_shim.wire.protocol import Frame

# Before the first measurement, calls are assumed to need this fraction (1/N) of the weights' bytes
# in addition, and at least the constant below.
_ACTIVATIONS_SHARE = 4
_LEAST_ACTIVATIONS_BYTES = 64 * MIB

Answer = dict[str, Any]


log = logging.getLogger(__name__)


@dataclass(slots=True)
class IncomingImages:
    """The incomplete uploads by tenant, and their bounds, also for a connection and a pause.

    Every upload reserves room for the whole image, which others then cannot use.
    """

    of_a_connection: int = 4
    of_a_tenant: int = 64
    silence_s: float = 120.0
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Incoming:
    """One upload, once it has begun; `silence` ends it, unless a piece is being written."""

    upload: WeightsUpload | None = None
    silence: asyncio.TimerHandle | None = None


class TenantTurns:
    """Shares the threads that hash weights among tenants, and paces a tenant's new images.

    One tenant may have some hashed `at_once`. After `burst` new images at any speed, it adds
    `images_per_s`; faster uploads wait.
    """

    def __init__(self, *, at_once: int = 2, burst: int = 4096, images_per_s: float = 50.0) -> None:
        self._at_once = at_once
        self._burst = burst
        self._every_s = 1.0 / images_per_s
        self._now_s = asyncio.get_running_loop().time
        # Whoever has or awaits a turn refers to its tenant's.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # When the tenant's last image would have been added at the steady rate; those that added
        # none for the longest time are first, and a time that has passed says nothing.
        self._paced_s: dict[str, float] = {}

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for one of the tenant's turns, and hold it until the end of the block."""
        free = self._turns.setdefault(tenant, asyncio.Semaphore(self._at_once))
        async with free:
            yield

    async def pace(self, tenant: str) -> None:
        """Count one new image of the tenant, and wait if it adds images too fast."""
        now_s = self._now_s()
        paced_s = max(self._paced_s.pop(tenant, 0.0), now_s) + self._every_s
        while self._paced_s and self._paced_s[oldest := next(iter(self._paced_s))] <= now_s:
            del self._paced_s[oldest]
        self._paced_s[tenant] = paced_s
        early_s = paced_s - self._burst * self._every_s - now_s
        if early_s > 0.0:
            await asyncio.sleep(early_s)


@dataclass(frozen=True, slots=True)
class Library:
    """The node's weights and their models; reports new models to the scheduler."""

    weights: StoredWeights
    store: WeightStore
    catalogue: Catalogue
    reports: NodeReports
    overhead_bytes: int
    turns: TenantTurns = field(default_factory=TenantTurns)
    incoming: IncomingImages = field(default_factory=IncomingImages)

    def add(self, session: ClientSession, digest: str, table: ImageTable) -> TenantModel:
        """Add the model of a function that has proved to have these weights, and report it."""
        model = self.catalogue.add(session.identity, digest, table)
        guess_bytes = max(_LEAST_ACTIVATIONS_BYTES, table.total_bytes // _ACTIVATIONS_SHARE)
        needed_bytes = table.total_bytes + guess_bytes + self.overhead_bytes
        spec = ModelSpec(model.id, needed_bytes, weights_bytes=table.total_bytes)
        self.reports.report(ModelRegistered(spec))
        self.weights.report_changed(digest)
        return model

    def model(self, session: ClientSession, digest: str) -> ModelId:
        """Return the session's model; raise UnknownImage without its weights or their proof."""
        if not self.store.allowed(str(session.identity), digest):
            raise UnknownImage(digest)
        if self.store.tier(digest) is Tier.ABSENT:
            raise UnknownImage(digest)
        return self.catalogue.of(session.identity.tenant, digest).id

    def has(self, session: ClientSession, digest: str) -> bool:
        """Whether the session's function may use these weights without another proof."""
        try:
            self.model(session, digest)
        except UnknownImage:
            return False
        return True

    def forget(self, session: ClientSession, digest: str) -> None:
        self.store.forget(str(session.identity), digest)
        self.weights.report_changed()


class WeightRequests:
    """The weight requests of one connection, which owns its uploads in pieces."""

    def __init__(self, library: Library, session: ClientSession) -> None:
        self._library = library
        self._store = library.store
        self._session = session
        self._tenant = session.identity.tenant
        self._function = str(session.identity)
        self._incoming: dict[str, _Incoming] = {}

    @property
    def arriving(self) -> bool:
        return bool(self._incoming)

    def offer(self, digest: str) -> Answer:
        """Return whether the node has these weights from this tenant, and from this function.

        Weights that only other tenants have count as absent: a digest alone, which others may know,
        must not reveal what they use.
        """
        have = self._store.known_to(self._tenant, digest)
        return {"have": have} | (
            {"yours": True} if self._library.has(self._session, digest) else {}
        )

    async def prove(self, asked: Prove, *, local: bool) -> tuple[Answer, tuple[int, ...]]:
        """Check the proof for weights; return a descriptor of the weights to a local function.

        A function that may use them already needs no proof: it could read them on its worker.
        """
        prove = partial(self._prove, asked.digest, asked.proof)
        async with self._library.turns.turn(self._tenant):
            proved = await in_thread(prove, discard=lambda proved: os.close(proved[0]))
        descriptor, table = proved
        try:
            self._library.add(self._session, asked.digest, table)
        except BaseException:
            os.close(descriptor)
            raise
        if local:
            return {}, (descriptor,)
        os.close(descriptor)
        return {}, ()

    async def upload(self, frame: Frame, asked: Upload) -> Answer:
        """Store weights from a descriptor, or begin an upload in pieces."""
        digest = asked.digest
        if not frame.descriptors:
            await self._begin(asked)
            return {}
        turns, catalogue = self._library.turns, self._library.catalogue
        catalogue.sending_begins(self._tenant, digest)
        try:
            await turns.pace(self._tenant)
            async with turns.turn(self._tenant):
                table = await in_thread(partial(self._adopt, frame.descriptors[0], asked))
            self._library.add(self._session, digest, table)
        finally:
            catalogue.sending_ends(self._tenant, digest)
        return {"digest": digest}

    async def chunk(self, frame: Frame, asked: Chunk) -> Answer:
        """Store one piece of an upload; the answer to the last one contains the digest."""
        digest = asked.digest
        with self._piece(digest, last=asked.last) as upload:
            await in_thread(partial(upload.write, asked.offset, frame.body))
            if not asked.last:
                return {}
            await self._library.turns.pace(self._tenant)
            async with self._library.turns.turn(self._tenant):
                await in_thread(upload.finish)
        self._library.add(self._session, digest, upload.table)
        return {"digest": digest}

    def forget(self, digest: str) -> None:
        self._library.forget(self._session, digest)

    def close(self) -> None:
        for digest in list(self._incoming):
            self._end(digest)

    async def _begin(self, asked: Upload) -> None:
        digest = asked.digest

        def begin() -> WeightsUpload:
            table = read_sizes(asked.sizes, asked.total)
            return self._store.upload(table, self._function, digest)

        self._reserve(digest)
        try:
            upload = await in_thread(begin, discard=WeightsUpload.close)
        except BaseException:
            self._end(digest)
            raise
        self._incoming[digest].upload = upload
        self._wait(digest)

    def _reserve(self, digest: str) -> None:
        """Count an upload that is to begin; raise ClientNotAllowed if there are too many."""
        images, tenant = self._library.incoming, self._tenant
        if digest in self._incoming:
            raise ClientNotAllowed("these weights are being uploaded already")
        if len(self._incoming) >= images.of_a_connection:
            raise ClientNotAllowed(f"{images.of_a_connection} uploads have not ended")
        if images.counts[tenant] >= images.of_a_tenant:
            raise ClientNotAllowed(f"{images.of_a_tenant} uploads of {tenant} have not ended")
        self._incoming[digest] = _Incoming()
        images.counts[tenant] += 1
        self._library.catalogue.sending_begins(self._tenant, digest)

    @contextmanager
    def _piece(self, digest: str, *, last: bool) -> Iterator[WeightsUpload]:
        """Give the upload to the block, which writes a piece; end the upload after the last one.

        An upload of which a piece cannot be written has ended too.
        """
        found = self._incoming.get(digest)
        if found is None or found.upload is None:
            raise BadFrame("a piece of weights without an upload")
        if found.silence is not None:
            found.silence.cancel()
        try:
            yield found.upload
        except BaseException:
            self._end(digest)
            raise
        if last:
            self._end(digest)
        else:
            self._wait(digest)

    def _end(self, digest: str) -> None:
        found = self._incoming.pop(digest)
        if found.silence is not None:
            found.silence.cancel()
        if found.upload is not None:
            found.upload.close()
        self._library.incoming.counts[self._tenant] -= 1
        if not self._library.incoming.counts[self._tenant]:
            del self._library.incoming.counts[self._tenant]
        self._library.catalogue.sending_ends(self._tenant, digest)

    def _wait(self, digest: str) -> None:
        loop, silence_s = asyncio.get_running_loop(), self._library.incoming.silence_s
        self._incoming[digest].silence = loop.call_later(silence_s, self._give_up, digest)

    def _give_up(self, digest: str) -> None:
        log.warning("an upload of %s ended: no piece came for a while", self._tenant)
        self._end(digest)

    # -- in threads -----------------------------------------------------------------------------

    def _prove(self, digest: str, proof: str | None) -> tuple[int, ImageTable]:
        if proof is not None:
            self._store.prove(digest, self._session.nonce, proof, self._function)
        elif not self._library.has(self._session, digest):
            raise UnknownImage(digest)
        with self._store.open(digest) as hold:
            return os.dup(hold.descriptor), hold.table

    def _adopt(self, sent: int, asked: Upload) -> ImageTable:
        table = read_sizes(asked.sizes, asked.total)
        copy = os.dup(sent)  # for the store; the frame's descriptor will be closed
        self._store.adopt(copy, table, self._function, asked.digest)
        return table
