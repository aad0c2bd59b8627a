"""Issues and checks clients' credentials with the manager's secret; loads the secret's file."""

import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from common.gpu_wishes import USUAL, GpuWishes
from common.whole_files import make_file
from gpu_manager.errors import BadSetting

_SECRET_BYTES = 32
_LEAST_SECRET_BYTES = 16
# The names that OpenFaaS allows for namespaces and functions.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class FunctionIdentity:
    """A function, the tenant (namespace) that it belongs to, and what its deployment wishes."""

    tenant: str
    function: str
    wishes: GpuWishes = field(default=USUAL, compare=False)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.function}"


# No function can have this name, so no deployment can gain administrator rights.
ADMINISTRATOR = FunctionIdentity("admin", "*")


class FunctionCredentials:
    """Issues credentials, `tenant/function?wishes:mac`, and checks them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def issue(self, identity: FunctionIdentity) -> str:
        """Return the credential for this function; its deployment passes it to the function."""
        for name in (identity.tenant, identity.function):
            if identity != ADMINISTRATOR and not _NAME.fullmatch(name):
                raise BadSetting("function", str(identity), "letters, digits, '-', '_' and '.'")
        wishes = identity.wishes.text()
        name = f"{identity}?{wishes}" if wishes else str(identity)
        return f"{name}:{self._mac(name)}"

    def identify(self, credential: str) -> FunctionIdentity | None:
        """Return the function of a credential; None if it was not issued with this secret."""
        name, _, mac = credential.rpartition(":")
        if not hmac.compare_digest(mac.encode(), self._mac(name).encode()):
            return None
        who, _, wishes = name.partition("?")
        tenant, _, function = who.partition("/")
        return FunctionIdentity(tenant, function, GpuWishes.of_text(wishes))

    def _mac(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), "sha256").hexdigest()


def fresh_secret() -> bytes:
    """Return a random secret, valid for the life of one process."""
    return secrets.token_bytes(_SECRET_BYTES)


def load_secret(path: Path, *, make: bool = True) -> bytes:
    """Return the secret in this file; if it is missing, `make` one, readable only by its owner."""
    try:
        secret = _read(path)
    except FileNotFoundError as error:
        if not make:
            raise BadSetting("secret file", str(path), "there is no such file") from error
        _make(path)
        secret = _read(path)
    except OSError as error:
        raise BadSetting("secret file", str(path), error.strerror or str(error)) from error
    if len(secret) < _LEAST_SECRET_BYTES:
        raise BadSetting("secret file", str(path), f"shorter than {_LEAST_SECRET_BYTES} bytes")
    return secret


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        mode = found.st_mode
        # A file of another owner, as Kubernetes mounts secrets, may be readable by its group.
        least = stat.S_IRGRP if found.st_uid != os.geteuid() else 0
        if mode & (stat.S_IRWXG | stat.S_IRWXO) & ~least:
            detail = f"other users may access it (mode {stat.S_IMODE(mode):o}); chmod 600 it"
            raise BadSetting("secret file", str(path), detail)
        return file.read()


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        make_file(path, fresh_secret())
    except OSError as error:
        raise BadSetting("secret file", str(path), error.strerror or str(error)) from error
