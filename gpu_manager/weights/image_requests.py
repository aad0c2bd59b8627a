"""Requests for images: what a load has of its weights while they may still be on their way."""

import asyncio
import os
from concurrent.futures import Future

from gpu_manager.weights.arriving_images import ArrivingImage, Joined
from gpu_manager.weights.host_images import ImageHold


class ImageRequest:
    """One request; whoever made it must close it, and has its hold if it was taken before."""

    def __init__(self, waiting: "Future[ImageHold]", descriptor: int) -> None:
        self.arriving: ArrivingImage | None = None  # if the image is not in memory yet
        self.descriptor = descriptor
        self._waiting = waiting
        self._taken = False

    @classmethod
    def in_memory(cls, hold: ImageHold) -> "ImageRequest":
        """A request for an image that is there."""
        there: Future[ImageHold] = Future()
        there.set_result(hold)
        return cls(there, hold.descriptor)

    @classmethod
    def on_its_way(cls, joined: Joined, arriving: ArrivingImage) -> "ImageRequest":
        """A request for an image that is being read."""
        found = cls(joined.waiting, joined.descriptor)
        found.arriving = arriving
        return found

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
        """Wait until the image is there, or never will be."""
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
