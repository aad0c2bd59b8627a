"""A session's requests about weights: offering, proving, uploading, forgetting."""

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

# What calls will take beyond the weights is measured; before that, this share and at least that.
_ACTIVATIONS_SHARE = 4
_LEAST_ACTIVATIONS_BYTES = 64 * MIB

Answer = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Library:
    """The node's weights, the models made of them, and the scheduler that learns of new ones."""

    node: NodeId
    store: WeightStore
    catalogue: Catalogue
    reports: NodeReports
    overhead_bytes: int

    def add(self, session: ClientSession, digest: str, table: ImageTable) -> TenantModel:
        """The session's function has shown that it has these weights."""
        model = self.catalogue.add(session.identity, digest, table)
        guess_bytes = max(_LEAST_ACTIVATIONS_BYTES, table.total_bytes // _ACTIVATIONS_SHARE)
        needed_bytes = table.total_bytes + guess_bytes + self.overhead_bytes
        self.reports.report(ModelRegistered(ModelSpec(model.id, needed_bytes)))
        self.tell_tiers()
        return model

    def model(self, session: ClientSession, digest: str) -> ModelId:
        """The model that the session means; it must have shown the weights, and they be here."""
        if not self.store.allowed(str(session.identity), digest):
            raise UnknownImage(digest)
        if self.store.tier(digest) is Tier.ABSENT:
            raise UnknownImage(digest)
        return self.catalogue.of(session.identity.tenant, digest).id

    def tell_tiers(self) -> None:
        """Tell the scheduler where weights are now, as far as that changed."""
        for model in self.catalogue:
            tier = self.store.tier(model.digest)
            if tier is not model.reported:
                model.reported = tier
                self.reports.report(ModelDemoted(self.node, None, model.id, tier))


class WeightRequests:
    """One connection's; an upload in pieces belongs to the connection that began it."""

    def __init__(self, library: Library, session: ClientSession) -> None:
        self._library = library
        self._store = library.store
        self._session = session
        self._function = str(session.identity)
        self._uploads: dict[str, WeightsUpload] = {}

    def offer(self, fields: Fields) -> Answer:
        """Whether the node has these weights."""
        digest = read.digest(fields)
        read_table(fields.get("table"), fields.get("total"))
        return {"have": self._store.tier(digest) is not Tier.ABSENT}

    async def prove(self, fields: Fields, *, local: bool) -> tuple[Answer, tuple[int, ...]]:
        """Let the function use weights that it has; where local, with a descriptor of them."""
        prove = partial(self._prove, read.digest(fields), read.text(fields, "proof"))
        descriptor, table = await _in_thread(prove, discard=lambda proved: os.close(proved[0]))
        self._library.add(self._session, read.digest(fields), table)
        if local:
            return {}, (descriptor,)
        os.close(descriptor)
        return {}, ()

    async def upload(self, frame: Frame, fields: Fields) -> Answer:
        """Take weights in: at once with a descriptor, else in pieces, which come next."""
        digest = read.digest(fields)
        table = read_table(fields.get("table"), fields.get("total"))
        if not frame.descriptors:
            self._begin(digest, table)
            return {}
        descriptor = os.dup(frame.descriptors[0])  # the store's own; the frame's will be closed
        adopt = partial(self._store.adopt, descriptor, table, self._function)
        return self._keep(digest, await _in_thread(adopt), table)

    async def chunk(self, frame: Frame, fields: Fields) -> Answer:
        """Take one piece in; the answer for the last one names the weights."""
        digest, offset = read.digest(fields), read.whole(fields, "offset")
        last = read.flag(fields, "last")
        upload = self._uploads.get(digest)
        if upload is None:
            raise BadFrame("a piece of weights that nobody announced")
        await _in_thread(partial(upload.write, offset, frame.body))
        if not last:
            return {}
        del self._uploads[digest]
        return self._keep(digest, await _in_thread(upload.finish), upload.table)

    def forget(self, fields: Fields) -> None:
        """The function uses these weights no more."""
        self._store.forget(self._function, read.digest(fields))

    def close(self) -> None:
        """Drop what came only in part."""
        for upload in self._uploads.values():
            upload.close()
        self._uploads.clear()

    def _prove(self, digest: str, proof: str) -> tuple[int, ImageTable]:
        self._store.prove(digest, self._session.nonce, proof, self._function)
        with self._store.open(digest) as hold:
            return os.dup(hold.descriptor), hold.table

    def _begin(self, digest: str, table: ImageTable) -> None:
        if digest in self._uploads:
            raise ClientNotAllowed("these weights are on their way already")
        self._uploads[digest] = self._store.upload(table, self._function)

    def _keep(self, announced: str, digest: str, table: ImageTable) -> Answer:
        if digest != announced:
            self._store.forget(self._function, digest)
            raise BadImage(f"announced as {announced}, its digest is {digest}")
        self._library.add(self._session, digest, table)
        return {"digest": digest}


async def _in_thread(work: Callable[[], T], discard: Callable[[T], None] | None = None) -> T:
    """The store hashes and reads files. What was begun is finished, also for a client that left."""
    done = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait({done})
        if discard is not None and done.exception() is None:
            discard(done.result())
        raise
