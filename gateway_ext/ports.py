"""The ports of the gateway: providers that run functions, and what these ask of others."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from common.gpu_wishes import GpuWishes
from gateway_ext.model import (
    NO_TROUBLES,
    Deployment,
    Endpoint,
    FunctionId,
    FunctionStatus,
    LogLine,
    Namespace,
    Troubles,
)


class FunctionListener(Protocol):
    """Receives a provider's changes; it is called in the event loop, and does not wait."""

    def function_is(
        self,
        deployment: Deployment,
        endpoints: Sequence[Endpoint],
        *,
        wanted: int,
        troubles: Troubles = NO_TROUBLES,
    ) -> None:
        """A function has this deployment and these endpoints; `wanted` replicas were requested.

        Called at every change, also if no instance is ready (no endpoints). An endpoint that is
        left out gets no new call from the moment of this call. `troubles` are those of now: while
        it does not start, and has no endpoint, its calls are refused.
        """

    def function_gone(self, function: FunctionId) -> None: ...

    async def drained(self, instances: Iterable[str], within_s: float) -> bool:
        """Wait until none of these instances has a call; False after `within_s`."""


class LogQuery(NamedTuple):
    """Which log lines to return."""

    function: FunctionId
    instance: str = ""
    tail: int | None = None
    since: datetime | None = None
    follow: bool = False


class Provider(Protocol):
    """Runs functions; every failure is raised as one of `gateway_ext.errors`."""

    @property
    def name(self) -> str:
        """The orchestration that `/system/info` shows."""

    async def start(self, listener: FunctionListener) -> None:
        """Restore the deployed functions, and report every change to the listener from now on."""

    async def close(self) -> None:
        """Stop, and end everything that this provider itself runs."""

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        """Accept the deployment, and replace one of that name; a later error is in its status.

        With `update` the function must exist, else UnknownFunction is raised.
        """

    async def remove(self, function: FunctionId) -> None:
        """Remove a function; its calls in flight may end."""

    async def scale(self, function: FunctionId, replicas: int) -> None:
        """Request this many replicas; the listener is called when they are ready."""

    async def functions(self, namespace: str) -> Sequence[FunctionStatus]:
        """All functions of a namespace, by name."""

    async def function(self, function: FunctionId, *, usage: bool) -> FunctionStatus:
        """UnknownFunction if there is none of that name."""

    def logs(self, query: LogQuery) -> AsyncGenerator[LogLine, None]:
        """Lines, oldest first; with `follow` until the caller closes it."""

    def template_bytes(self) -> Mapping[FunctionId, int]:
        """The memory of the process that instances of a function are forked from, if any."""

    async def secrets(self, namespace: str) -> Sequence[str]: ...

    async def create_secret(self, namespace: str, name: str, value: bytes) -> None:
        """SecretExists if there is one of that name."""

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        """UnknownSecret if there is none of that name."""

    async def remove_secret(self, namespace: str, name: str) -> None:
        """UnknownSecret if there is none, SecretInUse if a function mounts it."""

    async def namespaces(self) -> Sequence[Namespace]:
        """All namespaces, the default one among them."""

    async def create_namespace(self, namespace: Namespace) -> None:
        """NamespaceExists if there is one of that name."""

    async def update_namespace(self, namespace: Namespace) -> None:
        """Replace a namespace's labels; UnknownNamespace if there is none of that name."""

    async def remove_namespace(self, name: str) -> None:
        """Remove a namespace, not the default one, with all its functions and secrets."""


class Injection(Protocol):
    """The environment that activates the shim in a GPU function."""

    def environment(self, function: FunctionId, wishes: GpuWishes) -> Mapping[str, str]:
        """Variables to add: GPUFAAS_ENABLED, the address, the credential, the shim's path.

        The credential carries the wishes.

        It is asked before the function starts, and again for what this gateway finds running.
        """
