"""What the gateway asks of the world: providers that run functions, a scheduler that has GPUs."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from gateway_ext.model import (
    Deployment,
    Endpoint,
    FunctionId,
    FunctionStatus,
    LogLine,
    Namespace,
)


class FunctionListener(Protocol):
    """Receives a provider's changes; it is called in the event loop, and does not wait."""

    def function_is(
        self, deployment: Deployment, endpoints: Sequence[Endpoint], *, wanted: int
    ) -> None:
        """A function is deployed so, and answers there; `wanted` replicas were asked for.

        Called at every change, also when nothing is ready (no endpoints). An endpoint that is left
        out gets no new call from the moment of this call.
        """
        ...

    def function_gone(self, function: FunctionId) -> None:
        """It was removed."""
        ...

    async def drained(self, instances: Iterable[str], within_s: float) -> bool:
        """Wait until none of these instances has a call; False where they take longer."""
        ...


class LogQuery(NamedTuple):
    """Which lines are wanted."""

    function: FunctionId
    instance: str = ""
    tail: int | None = None
    since: datetime | None = None
    follow: bool = False


class Provider(Protocol):
    """Runs functions; what goes wrong is raised as one of `gateway_ext.errors`."""

    @property
    def name(self) -> str:
        """The orchestration that `/system/info` shows."""
        ...

    async def start(self, listener: FunctionListener) -> None:
        """Restore the deployed functions, and report every change to the listener from now on."""
        ...

    async def close(self) -> None:
        """Stop, leaving nothing behind that this provider runs itself."""
        ...

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        """Accept the deployment, and replace one of that name; a later error is in its status.

        With `update` there must be one: UnknownFunction else.
        """
        ...

    async def remove(self, function: FunctionId) -> None:
        """Take it away; calls in flight may end."""
        ...

    async def scale(self, function: FunctionId, replicas: int) -> None:
        """Ask for this many replicas; the listener hears when they are there."""
        ...

    async def functions(self, namespace: str) -> Sequence[FunctionStatus]:
        """Everything deployed in a namespace, by name."""
        ...

    async def function(self, function: FunctionId, *, usage: bool) -> FunctionStatus:
        """One of them."""
        ...

    def logs(self, query: LogQuery) -> AsyncIterator[LogLine]:
        """Lines, oldest first; with `follow` until the caller closes it."""
        ...

    async def secrets(self, namespace: str) -> Sequence[str]:
        """Names only."""
        ...

    async def create_secret(self, namespace: str, name: str, value: bytes) -> None:
        """SecretExists where there is one."""
        ...

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        """UnknownSecret where there is none."""
        ...

    async def remove_secret(self, namespace: str, name: str) -> None:
        """UnknownSecret where there is none; SecretInUse where a function has it mounted."""
        ...

    async def namespaces(self) -> Sequence[Namespace]:
        """The default one is always there."""
        ...

    async def create_namespace(self, namespace: Namespace) -> None:
        """NamespaceExists where there is one."""
        ...

    async def update_namespace(self, namespace: Namespace) -> None:
        """UnknownNamespace where there is none."""
        ...

    async def remove_namespace(self, name: str) -> None:
        """With all its functions and secrets."""
        ...


class Capacity(Protocol):
    """What the GPUs are known to have."""

    def largest_gpu_bytes(self) -> int | None:
        """The memory of the largest one; None where none is known."""
        ...


class Injection(Protocol):
    """What a GPU function is given so that the shim wakes up in it."""

    def environment(self, function: FunctionId) -> Mapping[str, str]:
        """Variables to add: GPUFAAS_ENABLED, its address, credential, the shim's path."""
        ...
