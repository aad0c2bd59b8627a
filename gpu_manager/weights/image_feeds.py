"""Tells a worker how much of an image it may copy to its GPU, while the image is being read."""

import os
import threading

from gpu_manager.devices.shared_path import PathTransfer, SharedPath
from gpu_manager.weights.image_requests import ImageRequest
from gpu_manager.worker.device.arrival import VERIFIED, packed


class ImageFeed:
    """The arrival of one image at a worker; each piece passes the shared path before it is told."""

    def __init__(self, request: ImageRequest, total_bytes: int, path: SharedPath) -> None:
        self._request = request
        self._arriving = request.arriving
        self._total_bytes = total_bytes
        self._path = path

    def follow(self) -> int:
        """Begin to tell; return the end of a pipe, which the caller must close."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        # The thread ends with the reading of the image, or when nobody reads the pipe any more.
        threading.Thread(target=self._feed, args=(writing,), name="feed", daemon=True).start()
        return reading

    async def over(self) -> None:
        """Wait until the image is in host memory, or never will be."""
        await self._request.over()

    def _feed(self, pipe: int) -> None:
        try:
            if self._tell_progress(pipe) and self._is_verified():
                os.write(pipe, packed(VERIFIED))
        except BrokenPipeError:
            return  # the worker has ended: who waits for it knows
        finally:
            os.close(pipe)

    def _tell_progress(self, pipe: int) -> bool:
        """Tell what is there until everything is; False if the reading has failed."""
        transfer = self._path.transfer()
        told = 0
        while told < self._total_bytes:
            present = self._wait_beyond(told, transfer)
            if present is None:
                return False
            while told < present:
                count = self._path.piece_bytes if self._path.is_limited else present - told
                count = min(count, present - told)
                transfer.move(count)
                told += count
                os.write(pipe, packed(told))
        return True

    def _wait_beyond(self, told: int, transfer: PathTransfer) -> int | None:
        if self._arriving is None:
            return self._total_bytes
        if self._arriving.present_bytes > told:
            return self._arriving.wait_beyond(told)
        present = self._arriving.wait_beyond(told)
        transfer.resume()
        return present

    def _is_verified(self) -> bool:
        return self._arriving is None or self._arriving.wait_verified()
