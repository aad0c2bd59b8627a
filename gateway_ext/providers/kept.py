"""What providers that keep functions themselves answer alike: lists, logs, secrets, namespaces."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from gateway_ext.errors import BadDeployment, SecretInUse, UnknownFunction, UnknownSecret
from gateway_ext.model import Deployment, FunctionId, FunctionStatus, LogLine, Namespace
from gateway_ext.ports import LogQuery
from gateway_ext.providers.function_log import FunctionLog
from gateway_ext.providers.namespaces import Namespaces
from gateway_ext.providers.secrets import Secrets


class KeptFunction(Protocol):
    """One deployed function."""

    log: FunctionLog

    @property
    def deployment(self) -> Deployment:
        """As it was deployed last."""
        ...

    @property
    def secrets(self) -> set[str]:
        """Those that any of its versions has mounted."""
        ...

    def scale(self, wanted: int) -> None:
        """Ask for this many replicas."""
        ...

    async def status(self, *, usage: bool) -> FunctionStatus:
        """What is shown of it."""
        ...


Kept = TypeVar("Kept", bound=KeptFunction)


class KeptFunctions(ABC, Generic[Kept]):
    """The part of `gateway_ext.ports.Provider` that does not depend on what runs functions."""

    def __init__(self, folder: Path) -> None:
        """Secrets and namespaces are kept in the folder."""
        self._secrets = Secrets(folder / "secrets")
        self._namespaces = Namespaces(folder / "namespaces.json")
        self._functions: dict[FunctionId, Kept] = {}

    @abstractmethod
    async def remove(self, function: FunctionId) -> None:
        """Forget it at once."""

    async def scale(self, function: FunctionId, replicas: int) -> None:
        """Ask for this many replicas."""
        self._found(function).scale(replicas)

    async def functions(self, namespace: str) -> Sequence[FunctionStatus]:
        """Everything deployed in a namespace, by name."""
        self._namespaces.check(namespace)
        ids = sorted(one for one in self._functions if one.namespace == namespace)
        return [await self._functions[one].status(usage=False) for one in ids]

    async def function(self, function: FunctionId, *, usage: bool) -> FunctionStatus:
        """One of them."""
        return await self._found(function).status(usage=usage)

    def logs(self, query: LogQuery) -> AsyncIterator[LogLine]:
        """Lines, oldest first."""
        return self._found(query.function).log.read(query)

    async def secrets(self, namespace: str) -> Sequence[str]:
        """Names only."""
        self._namespaces.check(namespace)
        return self._secrets.names(namespace)

    async def create_secret(self, namespace: str, name: str, value: bytes) -> None:
        """SecretExists where there is one."""
        self._namespaces.check(namespace)
        self._secrets.create(namespace, name, value)

    async def remove_secret(self, namespace: str, name: str) -> None:
        """SecretInUse where a function has it mounted."""
        if name not in self._secrets.names(namespace):
            raise UnknownSecret(namespace, name)
        for function in self._using(namespace, name):
            raise SecretInUse(name, function.deployment.id)
        self._secrets.remove(namespace, name)

    async def namespaces(self) -> Sequence[Namespace]:
        """The default one is always there."""
        return self._namespaces.all()

    async def create_namespace(self, namespace: Namespace) -> None:
        """NamespaceExists where there is one."""
        self._namespaces.create(namespace)

    async def update_namespace(self, namespace: Namespace) -> None:
        """UnknownNamespace where there is none."""
        self._namespaces.update(namespace)

    async def remove_namespace(self, name: str) -> None:
        """With all its functions and secrets."""
        self._namespaces.check_removable(name)
        for function in [one for one in self._functions if one.namespace == name]:
            await self.remove(function)
        for secret in self._secrets.names(name):
            self._secrets.remove(name, secret)
        self._namespaces.remove(name)

    def _found(self, function: FunctionId) -> Kept:
        found = self._functions.get(function)
        if found is None:
            raise UnknownFunction(function)
        return found

    def _using(self, namespace: str, secret: str) -> list[Kept]:
        return [
            function
            for id_, function in list(self._functions.items())
            if id_.namespace == namespace and secret in function.secrets
        ]

    def _check_secrets(self, deployment: Deployment) -> None:
        known = self._secrets.names(deployment.id.namespace)
        missing = [name for name in deployment.secrets if name not in known]
        if missing:
            namespace = deployment.id.namespace
            raise BadDeployment(f"there is no secret {', '.join(missing)} in {namespace}")
