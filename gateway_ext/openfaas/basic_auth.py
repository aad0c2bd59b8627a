"""Basic auth as OpenFaaS has it: a user and a password in two files, made if they are missing."""

import binascii
import contextlib
import hmac
import os
import secrets
from base64 import b64decode, b64encode
from pathlib import Path
from typing import NamedTuple

from gateway_ext.errors import BadRequest, NotAllowed

USER_FILE, PASSWORD_FILE = "basic-auth-user", "basic-auth-password"
_USER = "admin"
_PASSWORD_BYTES = 24


class BasicCredentials(NamedTuple):
    """The user and password that may manage functions."""

    user: str
    password: str

    @property
    def header(self) -> str:
        return "Basic " + b64encode(f"{self.user}:{self.password}".encode()).decode()


def credentials_in(folder: Path) -> BasicCredentials:
    """Missing files are made, readable by the owner only."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    user = _kept(folder / USER_FILE, _USER)
    return BasicCredentials(
        user, _kept(folder / PASSWORD_FILE, secrets.token_urlsafe(_PASSWORD_BYTES))
    )


def _kept(path: Path, new: str) -> str:
    """Read the file; of several processes that start at once, one creates it."""
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
    return _read(path)


def _read(path: Path) -> str:
    encoded = path.read_text(encoding="utf-8").strip()
    if not encoded:
        raise BadRequest(f"{path} is empty")
    return encoded


class Auth:
    """Checks credentials in constant time."""

    def __init__(self, credentials: BasicCredentials) -> None:
        self._usual = credentials.header.encode("latin-1")
        self._known = f"{credentials.user}:{credentials.password}".encode()

    def check(self, header: bytes) -> None:
        """Raise NotAllowed, unless this Authorization header holds the credentials."""
        if not self.holds(header):
            raise NotAllowed

    def holds(self, header: bytes) -> bool:
        if hmac.compare_digest(header, self._usual):
            return True
        scheme, _, encoded = header.partition(b" ")
        return scheme.lower() == b"basic" and hmac.compare_digest(_decoded(encoded), self._known)


def _decoded(encoded: bytes) -> bytes:
    try:
        return b64decode(encoded.strip(), validate=True)
    except binascii.Error:
        return b""
