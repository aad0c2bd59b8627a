"""What a worker is told of weights that are still on their way."""

import contextlib
import os
import select
import threading
from collections.abc import Callable

from gpu_manager.devices.image_file import VERIFIED, packed
from gpu_manager.devices.paths import Transfer, TransferAbandoned
from gpu_manager.weights.host_images import ImageRequest


class ImageFeed:
    """The arrival of one image at a worker; each block passes the GPU's path before it is told."""

    def __init__(
        self,
        request: ImageRequest,
        total_bytes: int,
        begin_transfer: Callable[[], Transfer] = Transfer,
    ) -> None:
        """`begin_transfer` begins what passes the GPU's path, when the image is followed."""
        self._request = request
        self._arriving = request.arriving
        self._total_bytes = total_bytes
        self._begin_transfer = begin_transfer
        self._told_bytes = 0

    def moved_bytes(self) -> int:
        """Return what was read so far, and what the worker was told of it."""
        read_bytes = self._total_bytes if self._arriving is None else self._arriving.present_bytes
        return read_bytes + self._told_bytes

    def follow(self) -> int:
        """Begin to tell (`devices/image_file.py`); the caller closes the end of a pipe returned."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        # The thread ends with the reading of the image, or when nobody reads the pipe any more.
        feeding = threading.Thread(target=self._feed, args=(writing,), name="feed", daemon=True)
        try:
            feeding.start()
        except BaseException:  # the system has no room for another thread
            os.close(reading)
            os.close(writing)
            raise
        return reading

    async def over(self) -> None:
        """Wait until the image is in host memory, or never will be."""
        await self._request.over()

    def _feed(self, pipe: int) -> None:
        try:
            if self._tell_progress(_Told(pipe)) and self._is_verified():
                os.set_blocking(pipe, True)
                os.write(pipe, packed(VERIFIED))
        except (BrokenPipeError, TransferAbandoned):
            return  # the worker has ended: who waits for it knows
        finally:
            os.close(pipe)

    def _tell_progress(self, told: "_Told") -> bool:
        """Tell what is there until everything is; False if the reading has failed."""
        transfer = self._begin_transfer()
        while told.end < self._total_bytes:
            present = self._wait_beyond(told.end, transfer)
            if present is None:
                return False
            transfer.move(present - told.end, told.add, told.is_heard)
            self._told_bytes = told.end
        return True

    def _wait_beyond(self, told: int, transfer: Transfer) -> int | None:
        if self._arriving is None:
            return self._total_bytes
        if self._arriving.present_bytes > told:
            return self._arriving.wait_beyond(told)
        present = self._arriving.wait_beyond(told)
        transfer.resume()
        return present

    def _is_verified(self) -> bool:
        return self._arriving is None or self._arriving.wait_verified()


class _Told:
    """A pipe to a worker that is told where the bytes end; it is never waited for.

    A worker that does not read must not keep the path: it misses numbers that later ones exceed.
    """

    def __init__(self, pipe: int) -> None:
        self.end = 0
        self._pipe = pipe
        os.set_blocking(pipe, False)
        self._poll = select.poll()
        self._poll.register(pipe, 0)  # errors are always reported

    def add(self, size_bytes: int) -> None:
        self.end += size_bytes
        with contextlib.suppress(BlockingIOError):
            os.write(self._pipe, packed(self.end))

    def is_heard(self) -> bool:
        """Whether the worker has the other end still."""
        return not self._poll.poll(0)
