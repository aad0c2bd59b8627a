"""The part of a provider that does not depend on the kind of its instances."""

import asyncio
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from common.tasks import error_of
from common.whole_files import put_file
from gateway_ext.errors import (
    BadDeployment,
    NamespaceExists,
    ProviderFailed,
    SecretExists,
    SecretInUse,
    UnknownFunction,
    UnknownNamespace,
    UnknownSecret,
)
from gateway_ext.model import (
    DEFAULT_NAMESPACE,
    Deployment,
    FunctionId,
    FunctionStatus,
    LogLine,
    Namespace,
)
from gateway_ext.ports import FunctionListener, LogQuery
from gateway_ext.providers.managed.function import ManagedFunction
from gateway_ext.providers.managed.records import R, RecordStore

log = logging.getLogger(__name__)

F = TypeVar("F", bound=ManagedFunction[Any, Any])


class ManagedProvider(ABC, Generic[F, R]):
    """Implements `gateway_ext.ports.Provider` except starting and ending instances."""

    def __init__(self, store: RecordStore[R]) -> None:
        self._store = store
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
        self._found(function).scale(replicas)

    async def functions(self, namespace: str) -> Sequence[FunctionStatus]:
        self._namespaces.check(namespace)
        ids = sorted(id_ for id_ in self._functions if id_.namespace == namespace)
        return [await self._functions[id_].status(usage=False) for id_ in ids]

    async def function(self, function: FunctionId, *, usage: bool) -> FunctionStatus:
        return await self._found(function).status(usage=usage)

    def logs(self, query: LogQuery) -> AsyncGenerator[LogLine, None]:
        return self._found(query.function).log.read(query)

    def template_bytes(self) -> Mapping[FunctionId, int]:
        return {id_: function.template_bytes for id_, function in self._functions.items()}

    async def secrets(self, namespace: str) -> Sequence[str]:
        self._namespaces.check(namespace)
        return self._secrets.names(namespace)

    async def create_secret(self, namespace: str, name: str, value: bytes) -> None:
        self._namespaces.check(namespace)
        self._secrets.put(namespace, name, value, new=True)

    async def remove_secret(self, namespace: str, name: str) -> None:
        if name not in self._secrets.names(namespace):
            raise UnknownSecret(namespace, name)
        for function in self._using(namespace, name):
            raise SecretInUse(name, function.deployment.id)
        self._secrets.remove(namespace, name)

    async def namespaces(self) -> Sequence[Namespace]:
        return self._namespaces.all()

    async def create_namespace(self, namespace: Namespace) -> None:
        self._namespaces.put(namespace, new=True)

    async def update_namespace(self, namespace: Namespace) -> None:
        self._namespaces.put(namespace, new=False)

    async def remove_namespace(self, name: str) -> None:
        async with self._deploying:  # else a function whose deployment is under way would stay
            self._namespaces.check(name)
            for function in [id_ for id_ in self._functions if id_.namespace == name]:
                self._remove(function)
            for secret in self._secrets.names(name):
                self._secrets.remove(name, secret)
            self._namespaces.remove(name)

    async def _opened(self, listener: FunctionListener) -> list[R]:
        """Take the state folder; returns the stored functions."""
        self._listener = listener
        records = await asyncio.to_thread(self._store.open)
        self._namespaces.open()
        return records

    def _remove(self, function: FunctionId) -> None:
        """Forget a function, while nothing is deployed; the rest is done in the background."""
        removed = self._functions.pop(function, None)
        if removed is None:
            raise UnknownFunction(function)
        self._store.forget(removed.record)
        self._listener.function_gone(function)
        task = asyncio.create_task(self._take_down(removed))
        self._leaving[task] = removed
        task.add_done_callback(self._taken_down)

    def _found(self, function: FunctionId) -> F:
        deployed = self._functions.get(function)
        if deployed is None:
            raise UnknownFunction(function)
        return deployed

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
        names = self._secrets.names(namespace)
        missing = [name for name in deployment.secrets if name not in names]
        if missing:
            raise BadDeployment(f"there is no secret {', '.join(missing)} in {namespace}")

    def _taken_down(self, task: asyncio.Task[None]) -> None:
        function = self._leaving.pop(task)
        if (error := error_of(task)) is not None:
            details = None if isinstance(error, ProviderFailed) else error
            text = "%s was not removed completely: %s"
            log.error(text, function.deployment.id, error, exc_info=details)


class NamespaceFile:
    """All namespaces; a change is on disk when the call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: dict[str, Namespace] = {}

    def open(self) -> None:
        if not self._path.exists():
            return
        try:
            read = json.loads(self._path.read_bytes())
            self._made = {name: Namespace(name, *map(dict, maps)) for name, maps in read.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ProviderFailed(f"{self._path} is damaged: {error}") from error

    def all(self) -> Sequence[Namespace]:
        namespaces = {DEFAULT_NAMESPACE: Namespace(DEFAULT_NAMESPACE), **self._made}
        return [namespaces[name] for name in sorted(namespaces)]

    def check(self, name: str) -> None:
        if name not in self._made and name != DEFAULT_NAMESPACE:
            raise UnknownNamespace(name)

    def put(self, namespace: Namespace, *, new: bool) -> None:
        if not new:
            self.check(namespace.name)
        elif namespace.name in self._made or namespace.name == DEFAULT_NAMESPACE:
            raise NamespaceExists(namespace.name)
        self._save({**self._made, namespace.name: namespace})

    def remove(self, name: str) -> None:
        """Remove a namespace other than the default one."""
        self._save({other: self._made[other] for other in self._made if other != name})

    def _save(self, made: dict[str, Namespace]) -> None:
        maps = {name: [dict(one.labels), dict(one.annotations)] for name, one in made.items()}
        put_file(self._path, json.dumps(maps).encode(), 0o600)
        self._made = made


class SecretFiles:
    """All secrets of all namespaces, readable for the gateway only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, namespace: str) -> list[str]:
        folder = self._folder / namespace
        if not folder.is_dir():
            return []
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))

    def value(self, namespace: str, name: str) -> bytes:
        try:
            return (self._folder / namespace / name).read_bytes()
        except FileNotFoundError as error:
            raise UnknownSecret(namespace, name) from error

    def put(self, namespace: str, name: str, value: bytes, *, new: bool) -> None:
        """SecretExists of a `new` one that is there, UnknownSecret of another that is not."""
        if (name in self.names(namespace)) is new:
            raise SecretExists(namespace, name) if new else UnknownSecret(namespace, name)
        folder = self._folder / namespace
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        put_file(folder / name, value, 0o600)

    def remove(self, namespace: str, name: str) -> None:
        (self._folder / namespace / name).unlink()

    def show(self, namespace: str, names: Iterable[str], folder: Path, gid: int | None) -> None:
        """Write these secrets, and no others, to a function's folder, for its group to read."""
        folder.mkdir(exist_ok=True)
        folder.chmod(0o750)
        if gid is not None:
            os.chown(folder, 0, gid)
        wanted = set(names)
        for path in folder.iterdir():
            if path.name not in wanted:
                path.unlink()
        for name in sorted(wanted):
            put_file(folder / name, self.value(namespace, name), 0o440, gid)
