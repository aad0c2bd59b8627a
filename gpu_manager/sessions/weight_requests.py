"""Handles a session's requests about weights: offer, proof, upload, forget."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from cache_manager.model.ids import MIB, ModelId, Tier
from gpu_manager.errors import BadImage, ClientNotAllowed, UnknownImage
from gpu_manager.node.tenant_models import Catalogue, TenantModel
from gpu_manager.sessions.sessions import ClientSession
from gpu_manager.weights.sealed_images import read_table
from gpu_manager.weights.uploads import WeightsUpload
from gpu_manager.weights.weight_store import WeightStore
from gpu_manager.wire import request_fields as read
from gpu_manager.wire.request_fields import Fields
from scheduler.api import ModelDemoted, ModelRegistered, ModelSpec, NodeId, NodeReports
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

    def add(self, session: ClientSession, digest: str, table: ImageTable) -> TenantModel:
        """Add the model of a function that has proved to have these weights, and report it."""
        model = self.catalogue.add(session.identity, digest, table)
        guess_bytes = max(_LEAST_ACTIVATIONS_BYTES, table.total_bytes // _ACTIVATIONS_SHARE)
        needed_bytes = table.total_bytes + guess_bytes + self.overhead_bytes
        self.reports.report(ModelRegistered(ModelSpec(model.id, needed_bytes)))
        self.report_tiers()
        return model

    def model(self, session: ClientSession, digest: str) -> ModelId:
        """Return the session's model; raise UnknownImage without its weights or their proof."""
        if not self.store.allowed(str(session.identity), digest):
            raise UnknownImage(digest)
        if self.store.tier(digest) is Tier.ABSENT:
            raise UnknownImage(digest)
        return self.catalogue.of(session.identity.tenant, digest).id

    def report_tiers(self) -> None:
        """Report the tiers of weights that have changed to the scheduler."""
        for model in self.catalogue:
            tier = self.store.tier(model.digest)
            if tier is not model.reported:
                model.reported = tier
                self.reports.report(ModelDemoted(self.node, None, model.id, tier))


class WeightRequests:
    """The weight requests of one connection, which owns its uploads in pieces."""

    def __init__(self, library: Library, session: ClientSession) -> None:
        self._library = library
        self._store = library.store
        self._session = session
        self._function = str(session.identity)
        self._uploads: dict[str, WeightsUpload] = {}

    def offer(self, fields: Fields) -> Answer:
        """Return whether the node has these weights."""
        digest = read.digest(fields)
        read_table(fields.get("table"), fields.get("total"))
        return {"have": self._store.tier(digest) is not Tier.ABSENT}

    async def prove(self, fields: Fields, *, local: bool) -> tuple[Answer, tuple[int, ...]]:
        """Check the proof for weights; return a descriptor of the weights to a local function."""
        prove = partial(self._prove, read.digest(fields), read.text(fields, "proof"))
        descriptor, table = await _in_thread(prove, discard=lambda proved: os.close(proved[0]))
        self._library.add(self._session, read.digest(fields), table)
        if local:
            return {}, (descriptor,)
        os.close(descriptor)
        return {}, ()

    async def upload(self, frame: Frame, fields: Fields) -> Answer:
        """Store weights from a descriptor, or begin an upload in pieces."""
        digest = read.digest(fields)
        table = read_table(fields.get("table"), fields.get("total"))
        if not frame.descriptors:
            self._begin(digest, table)
            return {}
        descriptor = os.dup(frame.descriptors[0])  # for the store; the frame's will be closed
        adopt = partial(self._store.adopt, descriptor, table, self._function)
        return self._keep(digest, await _in_thread(adopt), table)

    async def chunk(self, frame: Frame, fields: Fields) -> Answer:
        """Store one piece of an upload; the answer to the last one contains the digest."""
        digest, offset = read.digest(fields), read.whole(fields, "offset")
        last = read.flag(fields, "last")
        upload = self._uploads.get(digest)
        if upload is None:
            raise BadFrame("a piece of weights without an upload")
        await _in_thread(partial(upload.write, offset, frame.body))
        if not last:
            return {}
        del self._uploads[digest]
        return self._keep(digest, await _in_thread(upload.finish), upload.table)

    def forget(self, fields: Fields) -> None:
        """Withdraw the function's right to use these weights."""
        self._store.forget(self._function, read.digest(fields))

    def close(self) -> None:
        """Discard incomplete uploads."""
        for upload in self._uploads.values():
            upload.close()
        self._uploads.clear()

    def _prove(self, digest: str, proof: str) -> tuple[int, ImageTable]:
        self._store.prove(digest, self._session.nonce, proof, self._function)
        with self._store.open(digest) as hold:
            return os.dup(hold.descriptor), hold.table

    def _begin(self, digest: str, table: ImageTable) -> None:
        if digest in self._uploads:
            raise ClientNotAllowed("these weights are being uploaded already")
        self._uploads[digest] = self._store.upload(table, self._function)

    def _keep(self, announced: str, digest: str, table: ImageTable) -> Answer:
        if digest != announced:
            self._store.forget(self._function, digest)
            raise BadImage(f"announced as {announced}, its digest is {digest}")
        self._library.add(self._session, digest, table)
        return {"digest": digest}


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
