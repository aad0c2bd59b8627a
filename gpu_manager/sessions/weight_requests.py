"""Handles a session's requests about weights: offer, proof, upload, forget."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from cache_manager.model.ids import MIB, ModelId, Tier
from gpu_manager.errors import UnknownImage
from gpu_manager.node.stepping_down.tier_reports import TierReports
from gpu_manager.node.tenant_models import Catalogue, TenantModel
from gpu_manager.sessions.incoming_images import IncomingImages
from gpu_manager.sessions.sessions import ClientSession
from gpu_manager.sessions.tenant_turns import TenantTurns
from gpu_manager.weights.sealed_images import read_sizes
from gpu_manager.weights.uploads import WeightsUpload
from gpu_manager.weights.weight_store import WeightStore
from gpu_manager.wire import request_fields as read
from gpu_manager.wire.request_fields import Fields
from scheduler.api import ModelRegistered, ModelSpec, NodeId, NodeReports
from torch_shim.errors import BadFrame
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.image_digests import ImageTable

# Before the first measurement, calls are assumed to need this fraction (1/N) of the weights' bytes
# in addition, and at least the constant below.
_ACTIVATIONS_SHARE = 4
_LEAST_ACTIVATIONS_BYTES = 64 * MIB

Answer = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Library:
    """The node's weights and their models; reports new models to the scheduler."""

    node: NodeId
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
        self.report_tiers(digest)
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
        """Withdraw the function's right to use these weights."""
        self.store.forget(str(session.identity), digest)
        self.report_tiers()

    def report_tiers(self, *digests: str) -> None:
        """Report the tiers that have changed, of these weights and others, to the scheduler.

        Models whose weights this node no longer has are forgotten: their functions send them again.
        """
        tiers = TierReports(self.node, self.store, self.catalogue, self.reports)
        tiers.report_changed(*digests)


class WeightRequests:
    """The weight requests of one connection, which owns its uploads in pieces."""

    def __init__(self, library: Library, session: ClientSession) -> None:
        self._library = library
        self._store = library.store
        self._session = session
        self._tenant = session.identity.tenant
        self._function = str(session.identity)
        self._incoming = library.incoming.connection(self._tenant, library.catalogue)

    @property
    def arriving(self) -> bool:
        """Whether weights arrive in pieces."""
        return bool(len(self._incoming))

    def offer(self, fields: Fields) -> Answer:
        """Return whether the node has these weights from this tenant, and from this function.

        Weights that only other tenants have count as absent: a digest alone, which others may know,
        must not reveal what they use.
        """
        digest = read.digest(fields)
        have = self._store.known_to(self._tenant, digest)
        return {"have": have} | (
            {"yours": True} if self._library.has(self._session, digest) else {}
        )

    async def prove(self, fields: Fields, *, local: bool) -> tuple[Answer, tuple[int, ...]]:
        """Check the proof for weights; return a descriptor of the weights to a local function.

        A function that may use them already needs no proof: it could read them on its worker.
        """
        digest = read.digest(fields)
        prove = partial(self._prove, digest, read.text_or_none(fields, "proof"))
        async with self._library.turns.turn(self._tenant):
            proved = await _in_thread(prove, discard=lambda proved: os.close(proved[0]))
        descriptor, table = proved
        try:
            self._library.add(self._session, digest, table)
        except BaseException:
            os.close(descriptor)
            raise
        if local:
            return {}, (descriptor,)
        os.close(descriptor)
        return {}, ()

    async def upload(self, frame: Frame, fields: Fields) -> Answer:
        """Store weights from a descriptor, or begin an upload in pieces."""
        digest = read.digest(fields)
        if not frame.descriptors:
            await self._begin(digest, fields)
            return {}
        turns, catalogue = self._library.turns, self._library.catalogue
        catalogue.sending_begins(self._tenant, digest)
        try:
            await turns.pace(self._tenant)
            async with turns.turn(self._tenant):
                table = await _in_thread(partial(self._adopt, frame.descriptors[0], digest, fields))
            self._library.add(self._session, digest, table)
        finally:
            catalogue.sending_ends(self._tenant, digest)
        return {"digest": digest}

    async def chunk(self, frame: Frame, fields: Fields) -> Answer:
        """Store one piece of an upload; the answer to the last one contains the digest."""
        digest, offset = read.digest(fields), read.whole(fields, "offset")
        last = read.flag(fields, "last")
        with self._incoming.piece(digest, last=last) as upload:
            if upload is None:
                raise BadFrame("a piece of weights without an upload")
            await _in_thread(partial(upload.write, offset, frame.body))
            if not last:
                return {}
            await self._library.turns.pace(self._tenant)
            async with self._library.turns.turn(self._tenant):
                await _in_thread(upload.finish)
        self._library.add(self._session, digest, upload.table)
        return {"digest": digest}

    def forget(self, fields: Fields) -> None:
        """Withdraw the function's right to use these weights."""
        self._library.forget(self._session, read.digest(fields))

    def close(self) -> None:
        """Discard incomplete uploads."""
        self._incoming.close()

    async def _begin(self, digest: str, fields: Fields) -> None:
        def begin() -> WeightsUpload:
            return self._store.upload(
                read_sizes(fields.get("sizes"), fields.get("total")), self._function, digest
            )

        self._incoming.reserve(digest)
        try:
            upload = await _in_thread(begin, discard=WeightsUpload.close)
        except BaseException:
            self._incoming.end(digest)
            raise
        self._incoming.begun(digest, upload)

    # -- in threads -----------------------------------------------------------------------------

    def _prove(self, digest: str, proof: str | None) -> tuple[int, ImageTable]:
        if proof is not None:
            self._store.prove(digest, self._session.nonce, proof, self._function)
        elif not self._library.has(self._session, digest):
            raise UnknownImage(digest)
        with self._store.open(digest) as hold:
            return os.dup(hold.descriptor), hold.table

    def _adopt(self, sent: int, digest: str, fields: Fields) -> ImageTable:
        table = read_sizes(fields.get("sizes"), fields.get("total"))
        copy = os.dup(sent)  # for the store; the frame's descriptor will be closed
        self._store.adopt(copy, table, self._function, digest)
        return table


async def _in_thread(work: Callable[[], T], discard: Callable[[T], None] | None = None) -> T:
    """Run work of the store in a thread; work that has begun is finished even if cancelled."""
    done = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait({done})
        if discard is not None and done.exception() is None:
            discard(done.result())
        raise
