"""Namespaces that people made, in one file; the default one is always there."""

import json
from collections.abc import Sequence
from pathlib import Path

from gateway_ext.errors import BadRequest, NamespaceExists, ProviderFailed, UnknownNamespace
from gateway_ext.model import DEFAULT_NAMESPACE, Namespace
from gateway_ext.providers.files import put


class Namespaces:
    """All of them; a change is on disk when the call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: dict[str, Namespace] = {}

    def open(self) -> None:
        """Read what there is."""
        if not self._path.exists():
            return
        try:
            read = json.loads(self._path.read_bytes())
            self._made = {name: Namespace(name, *maps) for name, maps in read.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ProviderFailed(f"{self._path} is damaged: {error}") from error

    def all(self) -> Sequence[Namespace]:
        """By name."""
        found = {DEFAULT_NAMESPACE: Namespace(DEFAULT_NAMESPACE), **self._made}
        return [found[name] for name in sorted(found)]

    def check(self, name: str) -> None:
        """UnknownNamespace where there is none of that name."""
        if name not in self._made and name != DEFAULT_NAMESPACE:
            raise UnknownNamespace(name)

    def create(self, namespace: Namespace) -> None:
        """NamespaceExists where there is one."""
        if namespace.name in self._made or namespace.name == DEFAULT_NAMESPACE:
            raise NamespaceExists(namespace.name)
        self._set(namespace)

    def update(self, namespace: Namespace) -> None:
        """UnknownNamespace where there is none."""
        self.check(namespace.name)
        self._set(namespace)

    def check_removable(self, name: str) -> None:
        """UnknownNamespace where there is none; the default one stays."""
        self.check(name)
        if name == DEFAULT_NAMESPACE:
            raise BadRequest(f"the namespace {name} stays")

    def remove(self, name: str) -> None:
        """One that may be removed."""
        self.check_removable(name)
        del self._made[name]
        self._save()

    def _set(self, namespace: Namespace) -> None:
        self._made[namespace.name] = namespace
        self._save()

    def _save(self) -> None:
        said = {one.name: [dict(one.labels), dict(one.annotations)] for one in self._made.values()}
        put(self._path, json.dumps(said).encode(), 0o600)
