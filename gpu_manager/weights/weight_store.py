"""The node's weights in host memory: one copy of each image, by digest, within a budget.

All methods may be called from any thread; those that hash or touch the disk say so, for an
event loop to call them in an executor.
"""

import hmac
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from cache_manager.model.ids import Tier
from cache_manager.tiers.tier_index import TierIndex
from gpu_manager.errors import ProofRefused, UnknownImage, WeightsChanged, WeightStoreFull
from gpu_manager.weights.demoter import Demoter
from gpu_manager.weights.host_images import HostImages, ImageHold
from gpu_manager.weights.possession import PossessionRecord
from gpu_manager.weights.sealed_images import ImageWriter, check
from gpu_manager.weights.spill_directory import SpillCounts, SpillDirectory, Spilled
from gpu_manager.weights.store_status import StoreCounts, StoreStatus
from gpu_manager.weights.uploads import WeightsUpload
from torch_shim.wire.image_digests import ImageTable, image_digest, parts_of, possession_proof


class WeightStore:
    """Images by digest; beyond the budget some leave, as the cache manager's tier decides.

    What leaves memory goes to disk; an image in use leaves last, and stays reachable while it is
    held, for its memory lives anyway. Without a spill directory, what leaves is gone.
    """

    def __init__(
        self,
        index: TierIndex,
        spill: SpillDirectory | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index` is that of host memory, empty; `now_s` is its clock."""
        self.counts = StoreCounts()
        self._budget_bytes = index.budget_bytes
        self._now_s = now_s
        self._spill = spill
        self._owners = PossessionRecord()
        self._images = HostImages(index, now_s, self._left_memory)
        self._demoter = Demoter(self._images, spill, self.counts)
        self._counting = threading.Lock()  # taken after every other
        self._reading = threading.Lock()  # taken before every other

    # -- weights that come in -------------------------------------------------------------------

    def adopt(self, descriptor: int, table: ImageTable, function: str) -> str:
        """Keep sealed shared memory as it is, or drop it for the copy that is here; the digest.

        Takes the descriptor over, also when it raises. Hashes all of it, and may spill.
        """
        try:
            if table.total_bytes > self._budget_bytes:
                raise WeightStoreFull(table.total_bytes, self._budget_bytes)
            check(descriptor, table)
            digest = image_digest(parts_of(descriptor, table))
        except BaseException:
            os.close(descriptor)
            raise
        hold, known = self._images.take_in(digest, descriptor, table)
        with hold:  # room is not made by what has just come
            with self._counting:
                self.counts.duplicates += known
                self.counts.adopted += not known
            self._owners.add(function, digest)
            self._demoter.make_room()
        return digest

    def upload(self, table: ImageTable, function: str) -> WeightsUpload:
        """Reserve room for an image that will arrive in pieces (may spill)."""
        writer = ImageWriter(table)
        try:
            self._images.reserve(table.total_bytes)
        except WeightStoreFull:
            writer.close()
            raise
        self._demoter.make_room()
        return WeightsUpload(
            writer,
            keep=lambda descriptor: self.adopt(descriptor, table, function),
            ended=lambda: self._images.reserve_anyway(-table.total_bytes),
        )

    # -- who may use them -----------------------------------------------------------------------

    def prove(self, digest: str, nonce: str, proof: str, function: str) -> None:
        """Let the function use an image, or raise ProofRefused (hashes, may read from disk)."""
        with self.open(digest) as hold:
            expected = possession_proof(parts_of(hold.descriptor, hold.table), nonce)
        if not hmac.compare_digest(expected.encode(), proof.encode()):
            with self._counting:
                self.counts.proofs_refused += 1
            raise ProofRefused(function, digest)
        with self._counting:
            self.counts.proofs += 1
        self._owners.add(function, digest)

    def allowed(self, function: str, digest: str) -> bool:
        """Whether the function has shown that it has these weights."""
        return self._owners.allows(function, digest)

    def forget(self, function: str, digest: str) -> None:
        """The function must prove anew before it uses this image again."""
        self._owners.remove(function, digest)

    # -- weights that are used ------------------------------------------------------------------

    def tier(self, digest: str) -> Tier:
        """Where this node has the image."""
        if digest in self._images:
            return Tier.HOST
        return Tier.DISK if self._on_disk(digest) else Tier.ABSENT

    def open(self, digest: str) -> ImageHold:
        """Use an image until the hold is released (may read from disk, hash and spill)."""
        hold = self._images.open(digest)
        if hold is None:
            with self._reading:
                hold = self._images.open(digest) or self._read(digest)
        self._demoter.make_room()
        return hold

    def status(self) -> StoreStatus:
        """What is where, in bytes."""
        usage, spill = self._images.usage(), self._spill
        return StoreStatus(
            images=usage.images,
            kept_bytes=usage.kept_bytes,
            lingering_bytes=usage.lingering_bytes,
            reserved_bytes=usage.reserved_bytes,
            budget_bytes=usage.budget_bytes,
            disk_images=0 if spill is None else len(spill),
            disk_bytes=0 if spill is None else spill.used_bytes,
            counts=replace(self.counts),
            spill=SpillCounts() if spill is None else replace(spill.counts),
            rule=usage.rule,
            demotions=self._demoter.latest,
        )

    def close(self) -> None:
        """Close every descriptor; what is on disk stays for the next start."""
        with self._reading, self._demoter.at_rest():
            self._images.close()

    # -- reading --------------------------------------------------------------------------------

    def _read(self, digest: str) -> ImageHold:
        """Only one thread reads at a time, so that nothing is read twice."""
        if self._spill is None or digest not in self._spill:
            raise UnknownImage(digest)
        try:
            with self._spill.reading(digest) as spilled:
                descriptor = self._load(spilled)
        except WeightsChanged:
            if digest not in self._images:  # or it has come anew meanwhile
                self._owners.forget(digest)
            raise
        return self._images.take_in(digest, descriptor, spilled.table)[0]

    def _load(self, spilled: Spilled) -> int:
        """Read an image whatever uploads have reserved; held images linger above the budget."""
        size_bytes = spilled.table.total_bytes
        self._images.reserve_anyway(size_bytes)
        try:
            self._demoter.make_room()
            began_s = self._now_s()
            descriptor = spilled.load()
            self._images.was_read(size_bytes, self._now_s() - began_s)
            return descriptor
        finally:
            self._images.reserve_anyway(-size_bytes)

    def _on_disk(self, digest: str) -> bool:
        return self._spill is not None and digest in self._spill

    def _left_memory(self, digest: str) -> None:
        if not self._on_disk(digest):
            self.counts.lost += 1
            self._owners.forget(digest)
