"""The node's weights in host memory: one copy of each image, by digest, within a budget.

All methods may be called from any thread; those that hash or touch the disk say so, for an
event loop to call them in an executor.
"""

import hmac
import os
import threading
from collections import OrderedDict
from dataclasses import replace
from types import TracebackType
from typing import Self

from cache_manager.model import Tier
from gpu_manager.errors import (
    ProofRefused,
    StoreFailed,
    StoreFull,
    UnknownImage,
    WeightsChanged,
)
from gpu_manager.images import ImageWriter, check
from gpu_manager.spill import SpillCounts, SpillDirectory, Spilled
from gpu_manager.store_status import StoreCounts, StoreStatus
from gpu_manager.uploads import Upload
from torch_shim.digests import ImageTable, image_digest, parts_of, possession_proof


class _Image:
    """One copy in memory; `kept` while the budget counts it."""

    __slots__ = ("digest", "descriptor", "table", "holds", "kept")

    def __init__(self, digest: str, descriptor: int, table: ImageTable) -> None:
        self.digest = digest
        self.descriptor = descriptor
        self.table = table
        self.holds = 0
        self.kept = False

    @property
    def size_bytes(self) -> int:
        return self.table.total_bytes


class Hold:
    """An image that somebody uses: its memory stays until `release`."""

    def __init__(self, store: "WeightStore", image: _Image) -> None:
        self._store = store
        self._image: _Image | None = image
        self.digest = image.digest
        self.table = image.table

    @property
    def descriptor(self) -> int:
        """The store's own descriptor, to pass on: sealed, valid until release, not to be closed."""
        if self._image is None:
            raise UnknownImage(self.digest)
        return self._image.descriptor

    def release(self) -> None:
        """Use it no more; a second time changes nothing."""
        image, self._image = self._image, None
        if image is not None:
            self._store._released(image)  # noqa: SLF001 (a hold is a part of the store)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class WeightStore:
    """Images by digest; beyond the budget the least recently used go to disk, unused ones first.

    An image in use is evicted last and stays reachable while it is held, for its memory lives
    anyway. Without a spill directory, what is evicted is gone.
    """

    def __init__(self, budget_bytes: int, spill: SpillDirectory | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.counts = StoreCounts()
        self._spill = spill
        self._images: OrderedDict[str, _Image] = OrderedDict()  # least recently used first
        self._functions: dict[str, set[str]] = {}  # digest to who may use it
        self._kept_bytes = 0
        self._reserved_bytes = 0
        self._lock = threading.Lock()  # over the fields above; held for moments
        self._making_room = threading.Lock()  # order: _reading, _making_room, _lock
        self._reading = threading.Lock()

    # -- weights that come in -------------------------------------------------------------------

    def adopt(self, descriptor: int, table: ImageTable, function: str) -> str:
        """Keep sealed shared memory as it is, or drop it for the copy that is here; the digest.

        Takes the descriptor over, also when it raises. Hashes all of it, and may spill.
        """
        try:
            self._refuse_too_large(table.total_bytes)
            check(descriptor, table)
            digest = image_digest(parts_of(descriptor, table))
        except BaseException:
            os.close(descriptor)
            raise
        with self._lock:
            known = digest in self._images
            hold = self._take_in(digest, descriptor, table)
            self.counts.duplicates += known
            self.counts.adopted += not known
            self._allow(function, digest)
        with hold:  # what has just come is not what goes first
            self._make_room()
        return digest

    def upload(self, table: ImageTable, function: str) -> Upload:
        """Reserve room for an image that will arrive in pieces (may spill)."""
        writer = ImageWriter(table)
        try:
            self._reserve(table.total_bytes)
        except StoreFull:
            writer.close()
            raise
        return Upload(
            writer,
            keep=lambda descriptor: self.adopt(descriptor, table, function),
            ended=lambda: self._unreserve(table.total_bytes),
        )

    # -- who may use them -----------------------------------------------------------------------

    def prove(self, digest: str, nonce: str, proof: str, function: str) -> None:
        """Let the function use an image, or raise ProofRefused (hashes, may read from disk)."""
        with self.open(digest) as hold:
            expected = possession_proof(parts_of(hold.descriptor, hold.table), nonce)
        if not hmac.compare_digest(expected.encode(), proof.encode()):
            self.counts.proofs_refused += 1
            raise ProofRefused(function, digest)
        with self._lock:
            self.counts.proofs += 1
            self._allow(function, digest)

    def allowed(self, function: str, digest: str) -> bool:
        """Whether the function has shown that it has these weights."""
        return function in self._functions.get(digest, ())

    def forget(self, function: str, digest: str) -> None:
        """The function must prove anew before it uses this image again."""
        with self._lock:
            functions = self._functions.get(digest, set())
            functions.discard(function)
            if not functions:
                self._functions.pop(digest, None)

    # -- weights that are used ------------------------------------------------------------------

    def tier(self, digest: str) -> Tier:
        """Where this node has the image."""
        if digest in self._images:
            return Tier.HOST
        return Tier.DISK if self._on_disk(digest) else Tier.ABSENT

    def open(self, digest: str) -> Hold:
        """Use an image until the hold is released (may read from disk, hash and spill)."""
        hold = self._open_in_memory(digest)
        if hold is None:
            with self._reading:
                hold = self._open_in_memory(digest) or self._read(digest)
        self._make_room()
        return hold

    def spill_ahead(self) -> bool:
        """Write one image to disk before its memory is wanted; whether there was one.

        For quiet moments, in an executor. Does nothing while less than half of the budget is
        used, and nothing that would delete another file.
        """
        spill = self._spill
        if spill is None or self._kept_bytes * 2 <= self.budget_bytes:
            return False
        with self._making_room:
            room = spill.budget_bytes - spill.used_bytes
            with self._lock:
                waiting = (
                    image
                    for image in self._images.values()
                    if image.kept and image.digest not in spill and image.size_bytes < room
                )
                image = next(waiting, None)
            try:
                return image is not None and self._spill_out(image)
            except StoreFailed:
                return False

    def status(self) -> StoreStatus:
        """What is where, in bytes."""
        with self._lock:
            spill = self._spill
            held = sum(image.size_bytes for image in self._images.values())
            return StoreStatus(
                images=len(self._images),
                kept_bytes=self._kept_bytes,
                lingering_bytes=held - self._kept_bytes,
                reserved_bytes=self._reserved_bytes,
                budget_bytes=self.budget_bytes,
                disk_images=0 if spill is None else len(spill),
                disk_bytes=0 if spill is None else spill.used_bytes,
                counts=replace(self.counts),
                spill=SpillCounts() if spill is None else replace(spill.counts),
            )

    def close(self) -> None:
        """Close every descriptor; what is on disk stays for the next start."""
        with self._reading, self._making_room, self._lock:
            for image in self._images.values():
                os.close(image.descriptor)
            self._images.clear()
            self._kept_bytes = 0

    # -- the table; the caller holds _lock ------------------------------------------------------

    def _take_in(self, digest: str, descriptor: int, table: ImageTable) -> Hold:
        """Keep this copy, unless there is one."""
        image = self._images.get(digest)
        if image is None:
            image = self._images[digest] = _Image(digest, descriptor, table)
        else:
            os.close(descriptor)
        return self._hold(image)

    def _hold(self, image: _Image) -> Hold:
        """It is the most recently used now, and the budget counts it."""
        self._images.move_to_end(image.digest)
        if not image.kept:
            image.kept = True
            self._kept_bytes += image.size_bytes
        image.holds += 1
        return Hold(self, image)

    def _allow(self, function: str, digest: str) -> None:
        self._functions.setdefault(digest, set()).add(function)

    def _remove(self, image: _Image) -> None:
        del self._images[image.digest]
        os.close(image.descriptor)
        if not self._on_disk(image.digest):
            self.counts.lost += 1
            self._functions.pop(image.digest, None)

    # -- holding and reading --------------------------------------------------------------------

    def _open_in_memory(self, digest: str) -> Hold | None:
        with self._lock:
            image = self._images.get(digest)
            return None if image is None else self._hold(image)

    def _released(self, image: _Image) -> None:
        with self._lock:
            image.holds -= 1
            if self._images.get(image.digest) is not image:
                return  # the store was closed
            self._images.move_to_end(image.digest)
            if not image.holds and not image.kept:
                self._remove(image)

    def _read(self, digest: str) -> Hold:
        """Only one thread reads at a time, so that nothing is read twice."""
        if self._spill is None or digest not in self._spill:
            raise UnknownImage(digest)
        try:
            with self._spill.reading(digest) as spilled:
                descriptor = self._load(spilled)
        except WeightsChanged:
            with self._lock:
                if digest not in self._images:  # or it has come anew meanwhile
                    self._functions.pop(digest, None)
            raise
        with self._lock:
            return self._take_in(digest, descriptor, spilled.table)

    def _load(self, spilled: Spilled) -> int:
        """Never refused for uploads on their way: what they leave too little room for, lingers."""
        size = spilled.table.total_bytes
        with self._lock:
            self._reserved_bytes += size
        try:
            self._make_room()
            return spilled.load()
        finally:
            self._unreserve(size)

    # -- room -----------------------------------------------------------------------------------

    def _refuse_too_large(self, size: int) -> None:
        if size > self.budget_bytes:
            raise StoreFull(size, self.budget_bytes)

    def _reserve(self, size: int) -> None:
        with self._lock:
            left = self.budget_bytes - self._reserved_bytes
            if size > left:
                raise StoreFull(size, left)
            self._reserved_bytes += size
        self._make_room()

    def _unreserve(self, size: int) -> None:
        with self._lock:
            self._reserved_bytes -= size

    def _make_room(self) -> None:
        """Evict until the budget holds. What cannot be spilled goes only if nothing else can."""
        if self._excess_bytes() <= 0:
            return
        with self._making_room:
            unspillable: set[str] = set()
            while (victim := self._victim(unspillable)) is not None:
                if victim.digest in unspillable:
                    self._evict(victim)
                    continue
                try:
                    spilled = self._spill_out(victim)
                except StoreFailed:
                    unspillable |= self._not_on_disk()
                else:
                    if spilled:
                        self._evict(victim)
                    else:
                        unspillable.add(victim.digest)

    def _spill_out(self, image: _Image) -> bool:
        if self._spill is None:
            return False
        return self._spill.write(image.digest, image.descriptor, image.table)

    def _not_on_disk(self) -> set[str]:
        """One failure is enough: no other file is tried before somebody needs room again."""
        with self._lock:
            return {digest for digest in self._images if not self._on_disk(digest)}

    def _on_disk(self, digest: str) -> bool:
        return self._spill is not None and digest in self._spill

    def _excess_bytes(self) -> int:
        return self._kept_bytes + self._reserved_bytes - self.budget_bytes

    def _victim(self, unspillable: set[str]) -> _Image | None:
        with self._lock:
            if self._excess_bytes() <= 0:
                return None
            return min(
                (image for image in self._images.values() if image.kept),
                key=lambda image: (image.digest in unspillable, image.holds > 0),
                default=None,
            )

    def _evict(self, image: _Image) -> None:
        """Out of the budget, and out of memory unless somebody holds it."""
        with self._lock:
            if self._images.get(image.digest) is not image or not image.kept:
                return
            image.kept = False
            self._kept_bytes -= image.size_bytes
            self.counts.evicted += 1
            if not image.holds:
                self._remove(image)
