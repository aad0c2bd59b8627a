"""What a replica needs of an instance of any kind."""

import asyncio
from typing import Protocol

from gateway_ext.model import Endpoint

_EXITED = "exited with status "


def exited_with(status: object) -> str:
    """The reason of an end that the program itself chose."""
    return f"{_EXITED}{status}"


def chose_its_end(why: str) -> bool:
    """Whether an instance that ended for this reason was neither killed nor stopped by others."""
    return why.startswith(_EXITED)


class ManagedInstance(Protocol):
    """One container or process that serves a function, from its start to its end."""

    ready: bool
    exited: asyncio.Future[str]  # resolves to the reason of its end

    @property
    def name(self) -> str:
        """Its name in log lines and endpoints."""
        ...

    @property
    def endpoint(self) -> Endpoint:
        """Where it is called."""
        ...

    async def collect_output(self) -> None:
        """Store its output until it has ended and nothing is left of it."""
        ...

    async def until_ready(self, within_s: float) -> bool:
        """True once it can be called; False if it ends first or `within_s` passes."""
        ...

    async def stop(self, within_s: float) -> None:
        """Ask it to end; kill it after `within_s`."""
        ...

    def kill(self, why: str) -> None:
        """Kill it at once; `why` is the reason that `exited` resolves to."""
        ...
