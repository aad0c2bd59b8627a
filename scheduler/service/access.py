"""Authentication of the API: tokens derived from the cluster's secret, as bearer or basic auth."""

import hmac
from base64 import b64encode
from enum import StrEnum

from scheduler.wire.lease_tokens import derived_key


class ApiRole(StrEnum):
    """The rights of a caller: callers acquire and read, administrators do everything."""

    CALLER = "caller"
    ADMIN = "admin"


def token(secret: bytes, role: ApiRole) -> str:
    """The token of a role; it reveals neither the secret nor the other role's token."""
    return derived_key(secret, f"api, {role}").hex()


class ApiAccess:
    """Finds the role of a caller by the Authorization header.

    Programs send `Bearer TOKEN`; people may use basic credentials, the role's name as the user
    and its token as the password.
    """

    def __init__(self, secret: bytes) -> None:
        self._known = [(header, role) for role in ApiRole for header in _headers(secret, role)]

    def role(self, header: bytes) -> ApiRole | None:
        """The role of this header; None where it is not valid."""
        matched_role = None
        for credential, role in self._known:
            if hmac.compare_digest(credential, header):
                matched_role = role
        return matched_role


def _headers(secret: bytes, role: ApiRole) -> tuple[bytes, bytes]:
    secret_token = token(secret, role)
    basic = b64encode(f"{role}:{secret_token}".encode())
    return b"Bearer " + secret_token.encode(), b"Basic " + basic
