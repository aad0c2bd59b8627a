"""Carries out demotions from host memory: writes images to disk and drops them from memory."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cache_manager.model.ids import Tier
from cache_manager.tier_index import Demotion
from gpu_manager.errors import StoreFailed
from gpu_manager.weights.host_images import HostImage, HostImages
from gpu_manager.weights.spill_directory import SpillDirectory
from gpu_manager.weights.store_status import StoreCounts

_log = logging.getLogger(__name__)

_REMEMBERED = 32  # of the latest demotions
_LOGGED = 16  # victims of one demotion


class Demoter:
    """Makes the images in memory fit their budget; the tier's index selects the victims."""

    def __init__(
        self, images: HostImages, spill: SpillDirectory | None, counts: StoreCounts
    ) -> None:
        self._images = images
        self._spill = spill
        self._counts = counts
        self._lock = threading.Lock()  # taken before the images' lock; held while writing
        self._latest: deque[Demotion] = deque(maxlen=_REMEMBERED)

    @property
    def latest(self) -> tuple[Demotion, ...]:
        """The latest decisions with their reasons, the oldest first."""
        return tuple(self._latest)

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
                self._latest.append(demotion)
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

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Wait for demotions in progress, and block new ones inside the `with` block."""
        with self._lock:
            yield

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
                self._counts.evicted += 1

    def _write(self, image: HostImage, descriptor: int) -> set[str]:
        """Write an image to disk; return the digests of images that cannot be written."""
        if self._spill is None:
            return {image.digest}
        try:
            written = self._spill.write(image.digest, descriptor, image.table)
        except StoreFailed:
            # No other image is tried before the next shortage: the disk is full or broken.
            return {each for each in self._images.digests() if each not in self._spill}
        return set() if written else {image.digest}
