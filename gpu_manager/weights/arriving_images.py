"""Images on their way from disk to host memory: what is there can be read before the rest is.

Who waits for an image gets it only after the digest of its content was found right.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from gpu_manager.errors import StoreFailed, WeightStoreError
from gpu_manager.weights.host_images import ImageHold
from gpu_manager.weights.sealed_images import GrowingImage
from torch_shim.wire.image_digests import ImageTable


class ReadingTimes(NamedTuple):
    """When an image began to be read, when its last byte was there, and when it was verified."""

    begun_s: float
    read_s: float
    verified_s: float


class Joined(NamedTuple):
    """One who waits for an image: the hold to come, and a descriptor of the growing memory.

    Whoever joined closes the descriptor.
    """

    waiting: "Future[ImageHold]"
    descriptor: int


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

    @classmethod
    def joined(cls, digest: str, table: ImageTable) -> "tuple[ArrivingImage, Joined]":
        """An image, and the first who waits for it."""
        image = cls(digest, table)
        try:
            first = image.join()
        except StoreFailed:
            image.memory.close()
            raise
        assert first is not None, "nothing has ended its reading"
        return image, first

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits; once this is False, nobody can join any more."""
        with self._change:
            self._is_closed = self._is_closed or all(each.cancelled() for each in self._waiting)
            return not self._is_closed

    @property
    def present_bytes(self) -> int:
        """Where the bytes that are there end."""
        return self._present_bytes

    def join(self) -> Joined | None:
        """Wait for the image, too; None if its reading is over.

        StoreFailed if the system has no descriptor left.
        """
        with self._change:
            if self._is_closed:
                return None
            try:
                joined = Joined(Future(), os.dup(self.memory.descriptor))
            except OSError as error:
                raise StoreFailed(f"shared memory: {error}") from error
            self._waiting.append(joined.waiting)
            return joined

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
        """Note that the disk is being read from now on."""
        self._begun_s = time.monotonic()

    def note_present(self, end: int) -> None:
        """Note that all bytes before this offset are there."""
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
