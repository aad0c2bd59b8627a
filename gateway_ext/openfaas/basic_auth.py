"""Basic auth as OpenFaaS has it: a user and a password in two files, made if they are missing."""

import binascii
import hmac
import secrets
from base64 import b64decode, b64encode
from pathlib import Path
from typing import NamedTuple

from common.whole_files import make_file
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
    if not path.exists():
        make_file(path, new.encode())
    text = path.read_text(encoding="utf-8").strip()
    if not text:
        raise BadRequest(f"{path} is empty")
    return text


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
