"""The node's weights in host memory: one copy of each image, by digest, within a budget.

All methods may be called from any thread. The docstrings of methods that hash or access the disk
say so: an event loop must call them in an executor.
"""

import hmac
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from cache_manager.model.ids import Tier
from cache_manager.tier_index import Demotion, TierIndex
from gpu_manager.devices.paths import DiskPath
from gpu_manager.errors import (
    ProofRefused,
    ReadingGivenUp,
    StoreFailed,
    UnknownImage,
    WeightsChanged,
    WeightStoreError,
    WeightStoreFull,
)
from gpu_manager.weights.host_images import (
    ArrivingImage,
    HostImage,
    HostImages,
    ImageHold,
    ImageRequest,
)
from gpu_manager.weights.sealed_images import ImageWriter, WeightsUpload, checked_digest
from gpu_manager.weights.spill_directory import SpillDirectory, Spilled
from torch_shim.wire.image_digests import (
    GrowingDigest,
    ImageTable,
    parts_of,
    possession_proof,
)

_log = logging.getLogger(__name__)

_MOST_READINGS = 32  # at a time; further ones wait


_REMEMBERED = 32  # of the latest demotions
_LOGGED = 16  # victims of one demotion


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store's current content."""

    images: int
    kept_bytes: int  # that count against the budget
    lingering_bytes: int  # of evicted images that are held still
    reserved_bytes: int
    budget_bytes: int
    disk_images: int
    disk_bytes: int
    evicted: int  # since the start
    rule: str  # by which images leave host memory
    demotions: tuple[Demotion, ...]  # its latest decisions


class Demoter:
    """Makes the images in memory fit their budget; the tier's index selects the victims."""

    def __init__(self, images: HostImages, spill: SpillDirectory | None) -> None:
        self._images = images
        self._spill = spill
        self.evicted = 0
        self._lock = threading.Lock()  # taken before the images' lock; held while writing
        # The latest decisions with their reasons, the oldest first.
        self.latest: deque[Demotion] = deque(maxlen=_REMEMBERED)

    def make_room(self) -> None:
        """Demote until the budget holds (may write to disk)."""
        if not self._images.is_short:
            return
        with self._lock:
            stuck = set() if self._spill is not None else set(self._images.digests())
            while (demotion := self._images.room(stuck)) is not None:
                _log.info(
                    "host memory lacks %d bytes: demoting %d images by rule %s, first %s",
                    max(0, demotion.short_bytes),
                    len(demotion.victims),
                    demotion.rule,
                    ", ".join(demotion.victims[:_LOGGED]),
                )
                _log.debug("%s", demotion)
                self.latest.append(demotion)
                self._carry_out(demotion, stuck)

    def step_down(self, digest: str, tier: Tier, still: Callable[[], bool]) -> None:
        """Take an idle image out of memory, to disk or for good (may write to disk).

        It stays if it cannot be written, or if it is needed again before it leaves: just before,
        `still` is asked.
        """
        with self._lock:
            idle = self._images.idle(digest)
            if idle is None:
                return
            try:
                stays = tier is Tier.DISK and self._write(idle.image, idle.descriptor)
            finally:
                os.close(idle.descriptor)
            if not stays and still():
                self._images.remove_idle(idle)

    def close_images(self) -> None:
        """Let all images go, after the demotions that are in progress."""
        with self._lock:
            self._images.close()

    def _carry_out(self, demotion: Demotion, stuck: set[str]) -> None:
        """Demote the victims in turn, as long as the decision is still valid.

        Images that cannot be written are added to `stuck`: others are demoted before them.
        """
        for candidate in demotion.candidates[: len(demotion.victims)]:
            image = self._images.due(candidate)
            if image is None:
                return
            if not candidate.stuck:
                failed = self._write(image, image.descriptor)
                if failed:
                    stuck |= failed
                    return
            if self._images.demote(image):
                self.evicted += 1

    def _write(self, image: HostImage, descriptor: int) -> set[str]:
        """Write an image to disk; return the digests of images that cannot be written."""
        if self._spill is None:
            return {image.digest}
        try:
            written = self._spill.write(image.digest, descriptor, image.table)
        except StoreFailed:
            # No other image is tried before the next shortage: the disk is full or broken.
            return {digest for digest in self._images.digests() if digest not in self._spill}
        return set() if written else {image.digest}


class WeightStore:
    """Images by digest; beyond the budget, the cache manager's tier selects images to evict.

    Evicted images are written to disk; without a spill directory they are lost. Images in use are
    evicted last, and stay available while they are held, since their memory is kept anyway.
    """

    def __init__(
        self,
        index: TierIndex,
        spill: SpillDirectory | None = None,
        now_s: Callable[[], float] = time.monotonic,
        disk: DiskPath | None = None,
        readers: Executor | None = None,
    ) -> None:
        """`index` is the empty index of host memory; `now_s` is its clock.

        `disk` is the path that images from disk take. `readers` read them.
        """
        self._index = index
        self._now_s = now_s
        self._spill = spill
        self._owners = PossessionRecord()
        self._changed: set[str] = set()
        self._sent: Counter[str] = Counter()  # weights that are being sent, by digest
        self._images = HostImages(index, now_s, self._on_freed)
        if spill is not None:
            spill.on_change = self._on_disk_change
            spill.tenants = self._owners.tenants
        self._demoter = Demoter(self._images, spill)
        self._counting = threading.Lock()  # taken after every other lock
        self._disk = disk or DiskPath()
        self._arriving: dict[str, ArrivingImage] = {}
        self._requesting = threading.Lock()  # taken before every other lock, and never for long
        self._readers = readers or ThreadPoolExecutor(_MOST_READINGS, "read-weights")
        self._is_closed = False

    # -- adding weights -------------------------------------------------------------------------

    def adopt(
        self, descriptor: int, table: ImageTable, function: str, announced: str | None = None
    ) -> str:
        """Store sealed shared memory, or close it if the store has the content; return the digest.

        Takes ownership of the descriptor, even if it raises: BadImage if the digest is not the one
        that was announced. Hashes all bytes, and may spill.
        """
        self._note_sending(announced, 1)
        try:
            digest = self._checked_digest(descriptor, table, announced)
            self._take_in(digest, descriptor, table, function)
        finally:
            self._note_sending(announced, -1)
        return digest

    def _checked_digest(self, descriptor: int, table: ImageTable, announced: str | None) -> str:
        """Return the digest of sealed memory; close the memory if it is not what it should be."""
        try:
            if table.total_bytes > self._index.budget_bytes:
                raise WeightStoreFull(table.total_bytes, self._index.budget_bytes)
            return checked_digest(descriptor, table, announced)
        except BaseException:
            os.close(descriptor)
            raise

    def _take_in(self, digest: str, descriptor: int, table: ImageTable, function: str) -> None:
        owners = self._owners.tenants(digest) | {tenant_of(function)}
        # Held, so that making room does not evict the new image.
        with self._images.take_in(digest, descriptor, table, owners):
            self._owners.add(function, digest)
            self._note_change(digest)
            self._demoter.make_room()

    def upload(
        self, table: ImageTable, function: str, announced: str | None = None
    ) -> WeightsUpload:
        """Reserve room for an image that will arrive in pieces (may spill)."""
        writer, owner = ImageWriter(table), tenant_of(function)
        try:
            self._images.reserve(table.total_bytes, owner)
        except WeightStoreFull:
            writer.close()
            raise
        self._note_sending(announced, 1)

        def end() -> None:
            self._images.reserve_anyway(-table.total_bytes, owner)
            self._note_sending(announced, -1)

        upload = WeightsUpload(
            writer,
            keep=lambda descriptor: self.adopt(descriptor, table, function, announced),
            ended=end,
        )
        try:
            self._demoter.make_room()
        except BaseException:
            upload.close()
            raise
        return upload

    # -- rights to use weights ------------------------------------------------------------------

    def prove(self, digest: str, nonce: str, proof: str, function: str) -> None:
        """Check a function's proof, or raise ProofRefused (hashes, may read from disk).

        Weights that only other tenants have are unknown, with a right proof as with a wrong one.
        """
        if not self.known_to(tenant_of(function), digest):
            raise UnknownImage(digest)
        with self.open(digest) as hold:
            expected = possession_proof(parts_of(hold.descriptor, hold.table), nonce)
        if not hmac.compare_digest(expected.encode(), proof.encode()):
            raise ProofRefused(function, digest)
        self._owners.add(function, digest)

    def allowed(self, function: str, digest: str) -> bool:
        """Whether the function has sent these weights, or proved to have them."""
        return self._owners.allows(function, digest)

    def known_to(self, tenant: str, digest: str) -> bool:
        """Whether the node has these weights from a function of this tenant."""
        return tenant in self._owners.tenants(digest) and self.tier(digest) is not Tier.ABSENT

    def forget(self, function: str, digest: str) -> None:
        """Withdraw the function's right to use this image until it proves possession again.

        When no function has the right any more, the image's memory is freed; a copy on disk stays
        within the disk's budget.
        """
        image = self._images.get(digest)
        if self._owners.remove(function, digest) and image is not None:
            self._images.demote(image)

    # -- using weights --------------------------------------------------------------------------

    def take_changed(self) -> set[str]:
        """Return the digests whose tier may have changed since the last call."""
        with self._counting:
            changed, self._changed = self._changed, set()
        return changed

    def tier(self, digest: str) -> Tier:
        if digest in self._images:
            return Tier.HOST
        return Tier.DISK if self._on_disk(digest) else Tier.ABSENT

    def open(self, digest: str) -> ImageHold:
        """Return a hold on an image (may read from disk, hash and spill)."""
        hold = self._images.open(digest)
        if hold is None:
            request = self.request(digest, self._table(digest))
            try:
                hold = request.wait()
            finally:
                request.close()
        self._demoter.make_room()
        return hold

    def step_down(self, digest: str, tier: Tier, still: Callable[[], bool]) -> None:
        """Move weights down to this tier, to disk or for good (may write to disk).

        They stay where they are if the disk fails, and while they are held or sent; `still` is
        asked, on this thread, just before they leave: False means that they are needed again.
        """

        def may_leave() -> bool:
            return still() and not self._sent[digest]

        self._demoter.step_down(digest, tier, may_leave)
        if tier is Tier.ABSENT and self._spill is not None:
            with self._requesting:
                is_read = digest in self._arriving or digest in self._images
                if not is_read and may_leave():
                    self._spill.delete(digest)

    def request(self, digest: str, table: ImageTable) -> ImageRequest:
        """Request an image of this layout; it is read from disk in the background if need be.

        Returns at once: an event loop may call it.
        """
        fresh: ArrivingImage | None = None
        with self._requesting:
            if (hold := self._images.open(digest)) is not None:
                there: Future[ImageHold] = Future()
                there.set_result(hold)
                request = ImageRequest(there, hold.descriptor)
            else:
                request, fresh = self._join(digest, table)
        if fresh is not None:
            try:
                self._in_background(partial(self._read, fresh))
            except RuntimeError:  # the store has been closed since
                fresh.fail(ReadingGivenUp(digest))
        elif self._images.is_short:  # a held image counts again, if it was evicted before
            self._in_background(self._demoter.make_room)
        return request

    def status(self) -> StoreStatus:
        index, spill = self._index, self._spill
        return StoreStatus(
            images=len(self._images),
            kept_bytes=index.used_bytes,
            lingering_bytes=index.lingering_bytes,
            reserved_bytes=index.reserved_bytes,
            budget_bytes=index.budget_bytes,
            disk_images=0 if spill is None else len(spill),
            disk_bytes=0 if spill is None else spill.used_bytes,
            evicted=self._demoter.evicted,
            rule=index.rule,
            demotions=tuple(self._demoter.latest),
        )

    def close(self) -> None:
        """Give up reading, close every descriptor; files on disk are kept for the next start."""
        with self._requesting:
            self._is_closed = True
        self._readers.shutdown()
        self._demoter.close_images()

    # -- reading --------------------------------------------------------------------------------

    def _table(self, digest: str) -> ImageTable:
        if self._spill is None or digest not in self._spill:
            raise UnknownImage(digest)
        try:
            return self._spill.table(digest)
        except WeightsChanged:
            self._forget_changed(digest)
            raise

    def _join(self, digest: str, table: ImageTable) -> tuple[ImageRequest, ArrivingImage | None]:
        """Join the tasks that wait for this image; the first starts the read (lock held)."""
        arriving = self._arriving.get(digest)
        request = None if arriving is None else arriving.join()
        if request is not None:
            return request, None
        if self._is_closed or not self._on_disk(digest):
            raise UnknownImage(digest)
        arriving = ArrivingImage(digest, table)
        try:
            request = arriving.join()
        except StoreFailed:
            arriving.memory.close()
            raise
        assert request is not None, "nothing has ended its reading"
        self._arriving[digest] = arriving
        return request, arriving

    def _read(self, arriving: ArrivingImage) -> None:
        digest = arriving.digest
        try:
            descriptor = self._copy(arriving)
            owners = self._owners.tenants(digest)
            with self._images.take_in(digest, descriptor, arriving.table, owners):
                self._note_change(digest)
                arriving.finish(partial(self._images.hold, digest))
        except WeightStoreError as error:
            if isinstance(error, WeightsChanged):
                self._forget_changed(digest)
            arriving.fail(error)
        except BaseException as error:
            arriving.fail(error)
            raise
        finally:
            with self._requesting:
                if self._arriving.get(digest) is arriving:
                    del self._arriving[digest]

    def _copy(self, arriving: ArrivingImage) -> int:
        """Read an image regardless of reservations; held images may exceed the budget.

        Return the descriptor of the sealed memory.
        """
        assert self._spill is not None, "what is read is on disk"
        size_bytes = arriving.table.total_bytes
        self._images.reserve_anyway(size_bytes)
        try:
            with self._spill.reading(arriving.digest) as spilled:
                self._demoter.make_room()
                began_s = self._now_s()
                self._copy_verified(arriving, spilled)
                self._images.record_read(size_bytes, self._now_s() - began_s)
            return arriving.seal()  # not before: no error may come while nobody has the memory
        finally:
            self._images.reserve_anyway(-size_bytes)

    def _copy_verified(self, arriving: ArrivingImage, spilled: Spilled) -> None:
        digest, table = arriving.digest, arriving.table
        if spilled.table != table:
            raise WeightsChanged(digest, "its header describes another image")
        arriving.note_begun()
        transfer = self._disk.transfer(digest)
        with arriving.memory.view() as memory, GrowingDigest(memory, table) as growing:
            for size_bytes, end in spilled.copy(arriving.memory, self._disk.block_bytes):
                transfer.move(size_bytes)
                if self._is_closed or not arriving.is_wanted:
                    raise ReadingGivenUp(digest)
                arriving.note_present(end)
                growing.arrived(end)
            if growing.result() != digest:
                raise WeightsChanged(digest, "its content has another digest")

    def _forget_changed(self, digest: str) -> None:
        if digest not in self._images:  # unless it was uploaded again meanwhile
            self._owners.forget(digest)

    def _in_background(self, work: Callable[[], None]) -> None:
        self._readers.submit(work).add_done_callback(_log_failure)

    def _on_disk(self, digest: str) -> bool:
        return self._spill is not None and digest in self._spill

    def _on_freed(self, digest: str) -> None:
        self._note_change(digest)
        if not self._on_disk(digest):
            self._owners.forget(digest)

    def _on_disk_change(self, digest: str) -> None:
        self._note_change(digest)
        if digest not in self._images and not self._on_disk(digest):
            self._owners.forget(digest)

    def _note_sending(self, digest: str | None, more: int) -> None:
        if digest is not None:
            with self._counting:
                self._sent[digest] += more
                if not self._sent[digest]:
                    del self._sent[digest]

    def _note_change(self, digest: str) -> None:
        with self._counting:
            self._changed.add(digest)


def _log_failure(work: "Future[None]") -> None:
    error = work.exception()
    if error is not None:
        _log.error("the weight store fails", exc_info=error)


# Functions that are remembered of one tenant and image: nobody says that one is gone. Those that
# proved it the longest ago have to prove it again.
MOST_FUNCTIONS = 1_000


class PossessionRecord:
    """The functions that have proved to have weights, by digest and tenant. Thread-safe."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, dict[str, None]]] = {}  # functions, the latest last
        self._lock = threading.Lock()

    def add(self, function: str, digest: str) -> None:
        with self._lock:
            tenants = self._tenants.setdefault(digest, {})
            functions = tenants.setdefault(tenant_of(function), {})
            functions.pop(function, None)
            functions[function] = None
            if len(functions) > MOST_FUNCTIONS:
                del functions[next(iter(functions))]

    def tenants(self, digest: str) -> frozenset[str]:
        with self._lock:
            return frozenset(self._tenants.get(digest, ()))

    def allows(self, function: str, digest: str) -> bool:
        with self._lock:
            return function in self._tenants.get(digest, {}).get(tenant_of(function), {})

    def remove(self, function: str, digest: str) -> bool:
        """Remove the record, so that the function must prove possession again.

        Return whether it was the last one of these weights.
        """
        with self._lock:
            tenants, tenant = self._tenants.get(digest, {}), tenant_of(function)
            functions = tenants.get(tenant, {})
            if function not in functions:
                return False
            del functions[function]
            if not functions:
                del tenants[tenant]
            if not tenants:
                del self._tenants[digest]
            return not tenants

    def forget(self, digest: str) -> None:
        """Remove all records of weights that the node no longer has."""
        with self._lock:
            self._tenants.pop(digest, None)


def tenant_of(function: str) -> str:
    """Return the tenant of a function, `tenant/function`."""
    return function.partition("/")[0]
