"""Images that arrive in pieces: how many, and how long each may take between two pieces."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpu_manager.errors import ClientNotAllowed
from gpu_manager.node.tenant_models import Catalogue
from gpu_manager.weights.uploads import WeightsUpload

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IncomingLimits:
    """The most incomplete uploads of a connection and of a tenant, and the time without a piece.

    Every upload reserves room for the whole image, which others then cannot use.
    """

    of_a_connection: int = 4
    of_a_tenant: int = 64
    silence_s: float = 120.0


class IncomingImages:
    """The incomplete uploads of all tenants."""

    def __init__(self) -> None:
        self.limits = IncomingLimits()
        self.counts: Counter[str] = Counter()  # by tenant

    def connection(self, tenant: str, catalogue: Catalogue) -> "ConnectionUploads":
        """Return the uploads of a new connection; the catalogue is told what is being sent."""
        return ConnectionUploads(self, tenant, catalogue)


@dataclass(slots=True)
class _Incoming:
    """One upload, once it has begun; `silence` ends it, unless a piece is being written."""

    upload: WeightsUpload | None = None
    silence: asyncio.TimerHandle | None = None


class ConnectionUploads:
    """The incomplete uploads of one connection, by digest. `close` ends them."""

    def __init__(self, images: IncomingImages, tenant: str, catalogue: Catalogue) -> None:
        self._images = images
        self._tenant = tenant
        self._catalogue = catalogue
        self._incoming: dict[str, _Incoming] = {}

    def __len__(self) -> int:
        return len(self._incoming)

    def reserve(self, digest: str) -> None:
        """Count an upload that is to begin; raise ClientNotAllowed if there are too many."""
        limits = self._images.limits
        if digest in self._incoming:
            raise ClientNotAllowed("these weights are being uploaded already")
        if len(self._incoming) >= limits.of_a_connection:
            raise ClientNotAllowed(f"{limits.of_a_connection} uploads have not ended")
        if self._images.counts[self._tenant] >= limits.of_a_tenant:
            raise ClientNotAllowed(f"{limits.of_a_tenant} uploads of {self._tenant} have not ended")
        self._incoming[digest] = _Incoming()
        self._images.counts[self._tenant] += 1
        self._catalogue.sending_begins(self._tenant, digest)

    def begun(self, digest: str, upload: WeightsUpload) -> None:
        """Take ownership of an upload that has begun, after `reserve`."""
        self._incoming[digest].upload = upload
        self._wait(digest)

    @contextmanager
    def piece(self, digest: str, *, last: bool) -> Iterator[WeightsUpload | None]:
        """Give the upload to the block, which writes a piece; end the upload after the last one.

        An upload of which a piece cannot be written has ended too.
        """
        found = self._incoming.get(digest)
        if found is None:
            yield None
            return
        if found.silence is not None:
            found.silence.cancel()
        try:
            yield found.upload
        except BaseException:
            self.end(digest)
            raise
        if last:
            self.end(digest)
        else:
            self._wait(digest)

    def close(self) -> None:
        """End every upload."""
        for digest in list(self._incoming):
            self.end(digest)

    def end(self, digest: str) -> None:
        """End an upload, and discard what has arrived."""
        found = self._incoming.pop(digest)
        if found.silence is not None:
            found.silence.cancel()
        if found.upload is not None:
            found.upload.close()
        self._images.counts[self._tenant] -= 1
        if not self._images.counts[self._tenant]:
            del self._images.counts[self._tenant]
        self._catalogue.sending_ends(self._tenant, digest)

    def _wait(self, digest: str) -> None:
        loop, silence_s = asyncio.get_running_loop(), self._images.limits.silence_s
        self._incoming[digest].silence = loop.call_later(silence_s, self._give_up, digest)

    def _give_up(self, digest: str) -> None:
        log.warning("an upload of %s ended: no piece came for a while", self._tenant)
        self.end(digest)
