"""Who may use the API: tokens derived from the cluster's secret, as bearer or basic credentials."""

import hmac
from base64 import b64encode
from enum import StrEnum

from scheduler.keys import derived_key


class Role(StrEnum):
    """What somebody may do: callers acquire and read, administrators do everything."""

    CALLER = "caller"
    ADMIN = "admin"


def token(secret: bytes, role: Role) -> str:
    """What one who has the secret presents; it does not tell the secret, nor the other token."""
    return derived_key(secret, f"api, {role}").hex()


class Access:
    """Tells by an Authorization header who asks.

    Programs send `Bearer TOKEN`; people may use basic credentials, the role's name as the user
    and its token as the password.
    """

    def __init__(self, secret: bytes) -> None:
        self._known = [(header, role) for role in Role for header in _headers(secret, role)]

    def role(self, header: bytes) -> Role | None:
        """Whose header this is; None for one that the secret did not make."""
        found = None
        for known, role in self._known:
            if hmac.compare_digest(known, header):
                found = role
        return found


def _headers(secret: bytes, role: Role) -> tuple[bytes, bytes]:
    secret_token = token(secret, role)
    basic = b64encode(f"{role}:{secret_token}".encode())
    return b"Bearer " + secret_token.encode(), b"Basic " + basic
