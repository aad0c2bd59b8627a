"""Secrets as files: the gateway's own copy, and the copies that functions read."""

import os
from collections.abc import Iterable
from pathlib import Path

from gateway_ext.errors import SecretExists, UnknownSecret
from gateway_ext.providers.atomic_file import put


class SecretFiles:
    """All secrets of all namespaces, readable for the gateway only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, namespace: str) -> list[str]:
        """Names of the secrets of a namespace."""
        folder = self._folder / namespace
        if not folder.is_dir():
            return []
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))

    def value(self, namespace: str, name: str) -> bytes:
        """The content of a secret."""
        try:
            return self._path(namespace, name).read_bytes()
        except FileNotFoundError as error:
            raise UnknownSecret(namespace, name) from error

    def create(self, namespace: str, name: str, value: bytes) -> None:
        """SecretExists if there is one of that name."""
        if name in self.names(namespace):
            raise SecretExists(namespace, name)
        self._put(namespace, name, value)

    def update(self, namespace: str, name: str, value: bytes) -> None:
        """UnknownSecret if there is none of that name."""
        self._require(namespace, name)
        self._put(namespace, name, value)

    def remove(self, namespace: str, name: str) -> None:
        """UnknownSecret if there is none of that name."""
        self._require(namespace, name)
        self._path(namespace, name).unlink()

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
            put(folder / name, self.value(namespace, name), 0o440, gid)

    def _require(self, namespace: str, name: str) -> None:
        if name not in self.names(namespace):
            raise UnknownSecret(namespace, name)

    def _put(self, namespace: str, name: str, value: bytes) -> None:
        folder = self._folder / namespace
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        put(folder / name, value, 0o600)

    def _path(self, namespace: str, name: str) -> Path:
        return self._folder / namespace / name
