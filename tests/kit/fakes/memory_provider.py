"""A provider that keeps everything in memory; a test starts its instances."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from gateway_ext.errors import (
    NamespaceExists,
    SecretExists,
    SecretInUse,
    UnknownFunction,
    UnknownNamespace,
    UnknownSecret,
)
from gateway_ext.model import (
    DEFAULT_NAMESPACE,
    Deployment,
    Endpoint,
    FunctionId,
    FunctionStatus,
    LogLine,
    Namespace,
    Troubles,
    Usage,
)
from gateway_ext.ports import FunctionListener, LogQuery

CREATED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class FakeInstance(Protocol):
    """One fake instance."""

    endpoint: Endpoint

    async def close(self) -> None: ...


Start = Callable[[Deployment, str], Awaitable[FakeInstance]]


@dataclass
class MemoryFunction:
    """A deployed function and its instances."""

    deployment: Deployment
    wanted: int = 1
    instances: list[FakeInstance] = field(default_factory=list)
    trouble: str = ""
    template: str = ""


class MemoryProvider:
    """Every operation of the port; `start` makes an instance (without it, none is ever ready)."""

    name = "memory"

    def __init__(self, start: Start | None = None) -> None:
        self.running: dict[FunctionId, MemoryFunction] = {}
        self.known_secrets: dict[tuple[str, str], bytes] = {}
        self.known_namespaces = {DEFAULT_NAMESPACE: Namespace(DEFAULT_NAMESPACE)}
        self.lines: list[LogLine] = []
        self.scalings: list[tuple[FunctionId, int]] = []
        self.queries: list[LogQuery] = []
        self._start = start
        self._written = asyncio.Condition()
        self._listener: FunctionListener | None = None
        self._count = 0

    async def start(self, listener: FunctionListener) -> None:
        self._listener = listener
        for running in self.running.values():
            await self._settle(running)

    async def close(self) -> None:
        for running in self.running.values():
            await _close(running.instances)
            running.instances.clear()

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        old = self.running.get(deployment.id)
        if old is None and update:
            raise UnknownFunction(deployment.id)
        self._namespace(deployment.id.namespace)
        for secret in deployment.secrets:
            if (deployment.id.namespace, secret) not in self.known_secrets:
                raise UnknownSecret(deployment.id.namespace, secret)
        running = MemoryFunction(deployment, old.wanted if old else 1)
        self.running[deployment.id] = running
        await self._settle(running)
        if old is not None:
            await self._let_go(old.instances)

    async def remove(self, function: FunctionId) -> None:
        running = self._running(function)
        del self.running[function]
        if self._listener is not None:
            self._listener.function_gone(function)
        await self._let_go(running.instances)

    async def scale(self, function: FunctionId, replicas: int) -> None:
        running = self._running(function)
        self.scalings.append((function, replicas))
        running.wanted = replicas
        left, running.instances = running.instances[replicas:], running.instances[:replicas]
        await self._settle(running)
        await self._let_go(left)

    async def functions(self, namespace: str) -> Sequence[FunctionStatus]:
        self._namespace(namespace)
        found = sorted(id_ for id_ in self.running if id_.namespace == namespace)
        return [await self.function(id_, usage=False) for id_ in found]

    async def function(self, function: FunctionId, *, usage: bool) -> FunctionStatus:
        running = self._running(function)
        return FunctionStatus(
            running.deployment,
            running.wanted,
            len(running.instances),
            CREATED,
            Usage(12.5, 1024) if usage else None,
            running.trouble,
            running.template,
        )

    async def logs(self, query: LogQuery) -> AsyncGenerator[LogLine, None]:
        self.queries.append(query)
        lines = [line for line in self.lines if line.function == query.function]
        for line in lines[-query.tail :] if query.tail else lines:
            yield line
        seen = len(self.lines)
        while query.follow:
            async with self._written:
                await self._written.wait_for(lambda: len(self.lines) > seen)  # noqa: B023
            for line in self.lines[seen:]:
                yield line
            seen = len(self.lines)

    async def write(self, line: LogLine) -> None:
        """Add a log line of a function."""
        async with self._written:
            self.lines.append(line)
            self._written.notify_all()

    def template_bytes(self) -> Mapping[FunctionId, int]:
        """Nothing: instances are not processes here."""
        return {}

    async def secrets(self, namespace: str) -> Sequence[str]:
        self._namespace(namespace)
        return sorted(name for where, name in self.known_secrets if where == namespace)

    async def create_secret(self, namespace: str, name: str, value: bytes) -> None:
        self._namespace(namespace)
        if (namespace, name) in self.known_secrets:
            raise SecretExists(namespace, name)
        self.known_secrets[namespace, name] = value

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        self._secret(namespace, name)
        self.known_secrets[namespace, name] = value

    async def remove_secret(self, namespace: str, name: str) -> None:
        self._secret(namespace, name)
        for running in self.running.values():
            if running.deployment.id.namespace == namespace and name in running.deployment.secrets:
                raise SecretInUse(name, running.deployment.id)
        del self.known_secrets[namespace, name]

    async def namespaces(self) -> Sequence[Namespace]:
        return [self.known_namespaces[name] for name in sorted(self.known_namespaces)]

    async def create_namespace(self, namespace: Namespace) -> None:
        if namespace.name in self.known_namespaces:
            raise NamespaceExists(namespace.name)
        self.known_namespaces[namespace.name] = namespace

    async def update_namespace(self, namespace: Namespace) -> None:
        self._namespace(namespace.name)
        self.known_namespaces[namespace.name] = namespace

    async def remove_namespace(self, name: str) -> None:
        self._namespace(name)
        for function in [id_ for id_ in self.running if id_.namespace == name]:
            await self.remove(function)
        for secret in [key for key in self.known_secrets if key[0] == name]:
            del self.known_secrets[secret]
        del self.known_namespaces[name]

    def _namespace(self, name: str) -> None:
        if name not in self.known_namespaces:
            raise UnknownNamespace(name)

    def _secret(self, namespace: str, name: str) -> None:
        if (namespace, name) not in self.known_secrets:
            raise UnknownSecret(namespace, name)

    def _running(self, function: FunctionId) -> MemoryFunction:
        if function not in self.running:
            raise UnknownFunction(function)
        return self.running[function]

    async def _settle(self, running: MemoryFunction) -> None:
        """Start missing instances, then notify the listener."""
        while self._start is not None and len(running.instances) < running.wanted:
            self._count += 1
            name = f"{running.deployment.id.name}-{self._count}"
            running.instances.append(await self._start(running.deployment, name))
        self._tell(running)

    def spoil(self, function: FunctionId, trouble: str) -> None:
        """From now on it does not start, for this reason."""
        running = self._running(function)
        running.trouble = trouble
        self._tell(running)

    def _tell(self, running: MemoryFunction) -> None:
        if self._listener is not None:
            endpoints = [instance.endpoint for instance in running.instances]
            self._listener.function_is(
                running.deployment,
                endpoints,
                wanted=running.wanted,
                troubles=Troubles(running.trouble),
            )

    async def _let_go(self, instances: list[FakeInstance]) -> None:
        if self._listener is not None:
            await self._listener.drained([one.endpoint.instance for one in instances], 10.0)
        await _close(instances)


async def _close(instances: list[FakeInstance]) -> None:
    for instance in instances:
        await instance.close()
