"""What gateways may share: their jobs, and texts that all of them have; the port of its servers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from logging import Logger
from pathlib import Path
from typing import Protocol

from gateway_ext.errors import BadRequest
from gateway_ext.jobs.queue import JobQueue, QueueLimits
from gateway_ext.settings import GatewaySettings

_SQLITE = "sqlite"

TextKey = tuple[str, str]  # its parts have no dots


class TextCopy(Protocol):
    """One gateway's copy of texts; it serves calls while the servers are away."""

    def missing_because(self, why: str) -> None:
        """A text that is not here may be shared; empty: all shared ones are here."""

    def texts(self) -> Mapping[TextKey, str]:
        """All that this gateway stores."""

    async def follow(self, key: TextKey, text: str | None) -> None:
        """Have this text, or none; BadRequest leaves the copy as it is."""


class SharedTexts(Protocol):
    """The texts of all gateways: what is written here, each copy follows."""

    def check(self) -> None:
        """Raise QueueAway while nothing can be written."""

    async def write(self, key: TextKey, text: str | None) -> None:
        """Return once this gateway's copy has followed; None removes the text."""


class SharedStore(Protocol):
    """Servers that gateways share."""

    def queue(self, folder: Path, limits: QueueLimits, log: Logger) -> JobQueue:
        """The jobs that gateways share, not yet open; `folder` is this gateway's own."""

    def texts(
        self, name: str, copy: TextCopy, copied: Path, log: Logger
    ) -> AbstractAsyncContextManager[SharedTexts]:
        """Keep a copy of all texts called `name`; `copied` is where it says of which servers."""


Store = Callable[[GatewaySettings], SharedStore]


def shared_store(settings: GatewaySettings, stores: Sequence[Store]) -> SharedStore | None:
    """What the setting `queue` names; None: this gateway keeps all it knows in files."""
    if settings.queue == _SQLITE:
        return None
    for store in stores:
        return store(settings)
    raise BadRequest(f"queue: {settings.queue!r}: {_SQLITE} is expected")
