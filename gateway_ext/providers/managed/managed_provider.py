"""The part of a provider that does not depend on the kind of its instances."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from common.tasks import error_of
from gateway_ext.errors import (
    BadDeployment,
    ProviderFailed,
    SecretInUse,
    UnknownFunction,
    UnknownSecret,
)
from gateway_ext.model import Deployment, FunctionId, FunctionStatus, LogLine, Namespace
from gateway_ext.ports import FunctionListener, LogQuery
from gateway_ext.providers.managed.managed_function import ManagedFunction
from gateway_ext.providers.managed.namespace_file import NamespaceFile
from gateway_ext.providers.managed.record_store import R, RecordStore
from gateway_ext.providers.managed.secret_files import SecretFiles

log = logging.getLogger(__name__)

F = TypeVar("F", bound=ManagedFunction[Any, Any])


class ManagedProvider(ABC, Generic[F, R]):
    """Implements `gateway_ext.ports.Provider` except starting and ending instances."""

    def __init__(self, store: RecordStore[R]) -> None:
        """Secrets and namespaces are stored in the state folder too."""
        self._records = store
        self._secrets = SecretFiles(store.folder / "secrets")
        self._namespaces = NamespaceFile(store.folder / "namespaces.json")
        self._functions: dict[FunctionId, F] = {}
        self._leaving: dict[asyncio.Task[None], F] = {}
        self._deploying = asyncio.Lock()
        self._listener: FunctionListener

    @abstractmethod
    async def _take_down(self, function: F) -> None:
        """End all instances of a removed function, and delete what it had."""

    async def remove(self, function: FunctionId) -> None:
        """Forget the function at once; its instances end in the background, after their calls."""
        async with self._deploying:
            self._remove(function)

    async def scale(self, function: FunctionId, replicas: int) -> None:
        """Ask for this many replicas."""
        self._found(function).scale(replicas)

    async def functions(self, namespace: str) -> Sequence[FunctionStatus]:
        """All functions of a namespace, by name."""
        self._namespaces.check(namespace)
        ids = sorted(one for one in self._functions if one.namespace == namespace)
        return [await self._functions[one].status(usage=False) for one in ids]

    async def function(self, function: FunctionId, *, usage: bool) -> FunctionStatus:
        """One function; UnknownFunction if there is none of that name."""
        return await self._found(function).status(usage=usage)

    def logs(self, query: LogQuery) -> AsyncIterator[LogLine]:
        """Log lines, oldest first."""
        return self._found(query.function).log.read(query)

    def template_bytes(self) -> Mapping[FunctionId, int]:
        """The memory of each function's template."""
        return {id_: one.template_bytes for id_, one in self._functions.items()}

    async def secrets(self, namespace: str) -> Sequence[str]:
        """Names of the secrets of a namespace."""
        self._namespaces.check(namespace)
        return self._secrets.names(namespace)

    async def create_secret(self, namespace: str, name: str, value: bytes) -> None:
        """SecretExists if there is one of that name."""
        self._namespaces.check(namespace)
        self._secrets.create(namespace, name, value)

    async def remove_secret(self, namespace: str, name: str) -> None:
        """SecretInUse if a function has it mounted."""
        if name not in self._secrets.names(namespace):
            raise UnknownSecret(namespace, name)
        for function in self._using(namespace, name):
            raise SecretInUse(name, function.deployment.id)
        self._secrets.remove(namespace, name)

    async def namespaces(self) -> Sequence[Namespace]:
        """All namespaces, the default one among them."""
        return self._namespaces.all()

    async def create_namespace(self, namespace: Namespace) -> None:
        """NamespaceExists if there is one of that name."""
        self._namespaces.create(namespace)

    async def update_namespace(self, namespace: Namespace) -> None:
        """UnknownNamespace if there is none of that name."""
        self._namespaces.update(namespace)

    async def remove_namespace(self, name: str) -> None:
        """Remove a namespace with all its functions and secrets."""
        async with self._deploying:  # else a function whose deployment is under way would stay
            self._namespaces.check_removable(name)
            for function in [one for one in self._functions if one.namespace == name]:
                self._remove(function)
            for secret in self._secrets.names(name):
                self._secrets.remove(name, secret)
            self._namespaces.remove(name)

    async def _opened(self, listener: FunctionListener) -> list[R]:
        """Take the state folder; returns the stored functions."""
        self._listener = listener
        records = await asyncio.to_thread(self._records.open)
        self._namespaces.open()
        return records

    def _remove(self, function: FunctionId) -> None:
        """Forget a function, while nothing is deployed; the rest is done in the background."""
        found = self._functions.pop(function, None)
        if found is None:
            raise UnknownFunction(function)
        self._forget(found)
        self._listener.function_gone(function)
        task = asyncio.create_task(self._take_down(found))
        self._leaving[task] = found
        task.add_done_callback(self._taken_down)

    def _forget(self, function: F) -> None:
        self._records.forget(function.record)

    def _found(self, function: FunctionId) -> F:
        found = self._functions.get(function)
        if found is None:
            raise UnknownFunction(function)
        return found

    def _using(self, namespace: str, secret: str) -> list[F]:
        return [
            function
            for id_, function in list(self._functions.items())
            if id_.namespace == namespace and secret in function.secrets
        ]

    def _check(self, deployment: Deployment, *, update: bool) -> None:
        """Refuse a deployment whose namespace, function or secret does not exist."""
        namespace = deployment.id.namespace
        self._namespaces.check(namespace)
        if update:
            self._found(deployment.id)
        known = self._secrets.names(namespace)
        missing = [name for name in deployment.secrets if name not in known]
        if missing:
            raise BadDeployment(f"there is no secret {', '.join(missing)} in {namespace}")

    def _taken_down(self, task: asyncio.Task[None]) -> None:
        function = self._leaving.pop(task)
        if (error := error_of(task)) is not None:
            details = None if isinstance(error, ProviderFailed) else error
            text = "%s was not removed completely: %s"
            log.error(text, function.deployment.id, error, exc_info=details)
