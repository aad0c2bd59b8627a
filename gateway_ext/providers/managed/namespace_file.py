"""Namespaces that people made, in one file; the default namespace always exists."""

import json
from collections.abc import Sequence
from pathlib import Path

from gateway_ext.errors import BadRequest, NamespaceExists, ProviderFailed, UnknownNamespace
from gateway_ext.model import DEFAULT_NAMESPACE, Namespace
from gateway_ext.providers.atomic_file import put


class NamespaceFile:
    """All namespaces; a change is on disk when the call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: dict[str, Namespace] = {}

    def open(self) -> None:
        """Read the file, if there is one."""
        if not self._path.exists():
            return
        try:
            read = json.loads(self._path.read_bytes())
            self._made = {name: Namespace(name, *map(dict, maps)) for name, maps in read.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ProviderFailed(f"{self._path} is damaged: {error}") from error

    def all(self) -> Sequence[Namespace]:
        """All namespaces, by name."""
        found = {DEFAULT_NAMESPACE: Namespace(DEFAULT_NAMESPACE), **self._made}
        return [found[name] for name in sorted(found)]

    def check(self, name: str) -> None:
        """UnknownNamespace if there is none of that name."""
        if name not in self._made and name != DEFAULT_NAMESPACE:
            raise UnknownNamespace(name)

    def create(self, namespace: Namespace) -> None:
        """NamespaceExists if there is one of that name."""
        if namespace.name in self._made or namespace.name == DEFAULT_NAMESPACE:
            raise NamespaceExists(namespace.name)
        self._set(namespace)

    def update(self, namespace: Namespace) -> None:
        """UnknownNamespace if there is none of that name."""
        self.check(namespace.name)
        self._set(namespace)

    def check_removable(self, name: str) -> None:
        """UnknownNamespace if there is none; BadRequest for the default namespace."""
        self.check(name)
        if name == DEFAULT_NAMESPACE:
            raise BadRequest(f"the namespace {name} cannot be removed")

    def remove(self, name: str) -> None:
        """Remove a namespace; it raises what `check_removable` raises."""
        self.check_removable(name)
        del self._made[name]
        self._save()

    def _set(self, namespace: Namespace) -> None:
        self._made[namespace.name] = namespace
        self._save()

    def _save(self) -> None:
        maps = {one.name: [dict(one.labels), dict(one.annotations)] for one in self._made.values()}
        put(self._path, json.dumps(maps).encode(), 0o600)
