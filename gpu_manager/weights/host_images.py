"""Images in host memory, or on their way there: descriptors, and the index that selects victims.

Every method may be called from any thread and returns without blocking.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Self

from cache_manager.model.ids import ModelId
from cache_manager.tier_index import Demotion, DemotionCandidate, TierIndex
from gpu_manager.errors import StoreFailed, UnknownImage, WeightStoreError, WeightStoreFull
from gpu_manager.weights.sealed_images import GrowingImage
from torch_shim.wire.image_digests import ImageTable


@dataclass(slots=True, eq=False)
class HostImage:
    """One image in sealed shared memory; `uses` counts how often it was needed."""

    digest: str
    descriptor: int
    table: ImageTable
    uses: int = 0


class IdleImage(NamedTuple):
    """An image that nobody held, with a descriptor of its own, and how often it was needed."""

    image: HostImage
    descriptor: int
    uses: int


class ImageHold:
    """A reference to an image in use; the image's memory is kept until `release`."""

    def __init__(self, image: HostImage, released: Callable[[HostImage], None]) -> None:
        self._image: HostImage | None = image
        self._released = released
        self.digest = image.digest
        self.table = image.table

    @property
    def descriptor(self) -> int:
        """The store's descriptor of the sealed memory; valid until `release`, not to be closed."""
        if self._image is None:
            raise UnknownImage(self.digest)
        return self._image.descriptor

    def release(self) -> None:
        """Release the image; further calls do nothing."""
        image, self._image = self._image, None
        if image is not None:
            self._released(image)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class HostImages:
    """The images in memory; `on_freed` gets the digest of an image whose memory was freed."""

    def __init__(
        self, index: TierIndex, now_s: Callable[[], float], on_freed: Callable[[str], None]
    ) -> None:
        self._index = index
        self._now_s = now_s
        self._on_freed = on_freed
        self._images: dict[str, HostImage] = {}
        self._lock = threading.Lock()  # protects the images and their index

    def __contains__(self, digest: str) -> bool:
        return digest in self._images

    def __len__(self) -> int:
        return len(self._images)

    def get(self, digest: str) -> HostImage | None:
        return self._images.get(digest)

    @property
    def is_short(self) -> bool:
        """Whether the budget is exceeded; only until a demotion is carried out."""
        return self._index.is_short

    def digests(self) -> list[str]:
        with self._lock:
            return list(self._images)

    def take_in(
        self, digest: str, descriptor: int, table: ImageTable, owners: frozenset[str]
    ) -> ImageHold:
        """Add these tenants' image, or close the copy if one exists; return a hold."""
        with self._lock:
            image = self._images.get(digest)
            if image is not None:
                os.close(descriptor)
                self._index.set_owners(ModelId(digest), owners)
                return self._hold(image)
            image = self._images[digest] = HostImage(digest, descriptor, table)
            self._index.admit(ModelId(digest), table.total_bytes, self._now_s(), owners)
            return self._hold(image)

    def open(self, digest: str) -> ImageHold | None:
        with self._lock:
            image = self._images.get(digest)
            return None if image is None else self._hold(image)

    def hold(self, digest: str) -> ImageHold:
        """Return a hold on an image; raise UnknownImage if it is not in memory."""
        hold = self.open(digest)
        if hold is None:
            raise UnknownImage(digest)
        return hold

    def reserve(self, size_bytes: int, owner: str) -> None:
        """Reserve room for a tenant's upload, or raise WeightStoreFull.

        It is raised if too much is reserved already, by this tenant or by all.
        """
        with self._lock:
            left_bytes = self._index.may_reserve_bytes(owner)
            if size_bytes > left_bytes:
                raise WeightStoreFull(size_bytes, left_bytes)
            self._index.reserve(size_bytes, owner)

    def reserve_anyway(self, size_bytes: int, owner: str = "") -> None:
        """Reserve room for an image regardless of other reservations; negative to release it."""
        with self._lock:
            self._index.reserve(size_bytes, owner)

    def room(self, stuck: set[str]) -> Demotion | None:
        """Return which images to demote to meet the budget; `stuck` ones cannot be spilled."""
        with self._lock:
            return self._index.room(self._now_s(), stuck={ModelId(digest) for digest in stuck})

    def due(self, candidate: DemotionCandidate) -> HostImage | None:
        """Return the image if it must still be demoted and was not used since the decision."""
        with self._lock:
            return self._images[candidate.model] if self._index.still_due(candidate) else None

    def demote(self, image: HostImage) -> bool:
        """Remove an image from the budget, and from memory unless held; False if not present."""
        with self._lock:
            if ModelId(image.digest) not in self._index.residents:
                return False
            if self._index.demote(ModelId(image.digest)):
                self._drop(image)
            return True

    def idle(self, digest: str) -> IdleImage | None:
        """Return an image that nobody holds; the caller closes its descriptor."""
        with self._lock:
            resident, image = self._index.residents.get(ModelId(digest)), self._images.get(digest)
            if resident is None or image is None or resident.kept:
                return None
            return IdleImage(image, os.dup(image.descriptor), image.uses)

    def remove_idle(self, idle: IdleImage) -> bool:
        """Remove an image from memory; False if it has been needed since it was found idle."""
        with self._lock:
            resident = self._index.residents.get(ModelId(idle.image.digest))
            is_same = self._images.get(idle.image.digest) is idle.image
            if resident is None or not is_same or resident.kept or idle.image.uses != idle.uses:
                return False
            self._index.remove(ModelId(idle.image.digest))
            self._drop(idle.image)
            return True

    def record_read(self, size_bytes: int, took_s: float) -> None:
        with self._lock:
            self._index.was_read(size_bytes, took_s)

    def close(self) -> None:
        with self._lock:
            for image in self._images.values():
                os.close(image.descriptor)
                self._index.remove(ModelId(image.digest))
            self._images.clear()

    # -- with the lock held ---------------------------------------------------------------------

    def _hold(self, image: HostImage) -> ImageHold:
        """Hold an image: it becomes the most recently used, and counts against the budget."""
        image.uses += 1
        self._index.hold(ModelId(image.digest), self._now_s())
        return ImageHold(image, self._released)

    def _drop(self, image: HostImage) -> None:
        del self._images[image.digest]
        os.close(image.descriptor)
        self._on_freed(image.digest)

    def _released(self, image: HostImage) -> None:
        with self._lock:
            if self._images.get(image.digest) is not image:
                return  # the store was closed
            if self._index.release(ModelId(image.digest), self._now_s()):
                self._drop(image)


# Images on their way from disk to host memory: what is there can be read before the rest is.
#
# Who waits for an image gets it only after the digest of its content was found right.


class ReadingTimes(NamedTuple):
    """When an image began to be read, when its last byte was there, and when it was verified."""

    begun_s: float
    read_s: float
    verified_s: float


class ImageRequest:
    """One request; whoever made it must close it, and has its hold if it was taken before."""

    def __init__(
        self,
        waiting: "Future[ImageHold]",
        descriptor: int,
        arriving: "ArrivingImage | None" = None,
    ) -> None:
        """An image that is `arriving` is not in memory yet; the request has its descriptor."""
        self.arriving = arriving
        self.descriptor = descriptor
        self._waiting = waiting
        self._taken = False

    def wait(self) -> ImageHold:
        """Block until the image is there; the caller releases the hold."""
        hold = self._waiting.result()
        self._taken = True
        return hold

    async def hold(self) -> ImageHold:
        """Wait until the image is there; the caller releases the hold."""
        if not self._waiting.done():
            await asyncio.wrap_future(self._waiting)
        return self.wait()

    def raise_failure(self) -> None:
        """Raise the error for which the image will never be there, if there is one by now."""
        if self._waiting.done():
            self._waiting.result()

    async def over(self) -> None:
        if not self._waiting.done():
            await asyncio.wait({asyncio.wrap_future(self._waiting)})

    def close(self) -> None:
        """Give the request up; without effect on a hold that was taken."""
        if self.arriving is not None and self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
        if self._taken or self._waiting.cancel() or self._waiting.cancelled():
            return
        if self._waiting.exception() is None:
            self.wait().release()


class ArrivingImage:
    """One image that is being read, for all who wait for it. All methods are thread-safe."""

    def __init__(self, digest: str, table: ImageTable) -> None:
        self.digest = digest
        self.table = table
        self.memory = GrowingImage(table)
        self.times: ReadingTimes | None = None
        self._change = threading.Condition()
        self._present_bytes = 0
        self._waiting: list[Future[ImageHold]] = []
        self._is_closed = False  # to others who would join
        self._is_over = self._is_verified = False
        self._begun_s = self._read_s = time.monotonic()

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits; once this is False, nobody can join any more."""
        with self._change:
            self._is_closed = self._is_closed or all(future.cancelled() for future in self._waiting)
            return not self._is_closed

    @property
    def present_bytes(self) -> int:
        """Where the bytes that are there end."""
        return self._present_bytes

    def join(self) -> ImageRequest | None:
        """Request the image, too; None if its reading is over.

        StoreFailed if the system has no descriptor left.
        """
        with self._change:
            if self._is_closed:
                return None
            try:
                descriptor = os.dup(self.memory.descriptor)
            except OSError as error:
                raise StoreFailed(f"shared memory: {error}") from error
            self._waiting.append(Future())
            return ImageRequest(self._waiting[-1], descriptor, self)

    def wait_beyond(self, offset: int) -> int | None:
        """Wait until more than the bytes before this offset are there; return where they end.

        None if the reading has failed, and no more will be there.
        """
        with self._change:
            self._change.wait_for(lambda: self._is_over or self._present_bytes > offset)
            return self._present_bytes if self._present_bytes > offset else None

    def wait_verified(self) -> bool:
        """Wait for the end; return whether the content is right and the memory is sealed."""
        with self._change:
            self._change.wait_for(lambda: self._is_over)
            return self._is_verified

    # -- for the thread that reads --------------------------------------------------------------

    def note_begun(self) -> None:
        self._begun_s = time.monotonic()

    def note_present(self, end: int) -> None:
        with self._change:
            self._read_s = time.monotonic()
            self._present_bytes = end
            self._change.notify_all()

    def seal(self) -> int:
        """Seal the memory; return its descriptor, which the caller must close."""
        with self._change:
            self._is_closed = True
            return self.memory.seal()

    def finish(self, take: Callable[[], ImageHold]) -> None:
        """Give everybody who waits a hold, each from one call of `take`."""
        self.times = ReadingTimes(self._begun_s, self._read_s, time.monotonic())
        for waiting in self._close():
            if waiting.set_running_or_notify_cancel():
                try:
                    waiting.set_result(take())
                except WeightStoreError as error:
                    waiting.set_exception(error)
        self._end(verified=True)

    def fail(self, error: BaseException) -> None:
        """Free the memory; everybody who waits gets the error."""
        for waiting in self._close():
            if waiting.set_running_or_notify_cancel():
                waiting.set_exception(error)
        self.memory.close()
        self._end(verified=False)

    def _close(self) -> "list[Future[ImageHold]]":
        """Let nobody join any more; return who waits.

        They learn how it ended before the workers do, of whom they hear.
        """
        with self._change:
            self._is_closed = True
            return self._waiting

    def _end(self, *, verified: bool) -> None:
        with self._change:
            self._is_over, self._is_verified = True, verified
            self._change.notify_all()
