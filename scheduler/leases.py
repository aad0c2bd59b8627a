"""Signed lease tokens: what a caller shows to a GPU manager to use a lease that it was given."""

import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple

from cache_manager.model import GpuId, NodeId
from scheduler.codec import Codec
from scheduler.errors import BadToken, BadValue
from scheduler.keys import derived_key
from scheduler.model import LeaseId, RequestId, SlotId

_MOST_CHARACTERS = 4096


class LeaseClaims(NamedTuple):
    """Who may use which lease, and until when it may begin to, in seconds since 1970.

    `function` is `tenant/function`; `term` is that of the leader that gave the lease.
    """

    lease: LeaseId
    request: RequestId
    function: str
    node: NodeId
    gpu: GpuId
    slot: SlotId
    term: int
    expires_s: float


_CLAIMS: Codec[LeaseClaims] = Codec(LeaseClaims)


class LeaseTokens:
    """Signs and reads the tokens of one cluster."""

    def __init__(self, secret: bytes) -> None:
        self._key = derived_key(secret, "lease tokens")

    def sign(self, claims: LeaseClaims) -> str:
        """A token for these claims: text that fits into an HTTP header."""
        plain = json.dumps(_CLAIMS.to_plain(claims), separators=(",", ":"))
        body = _text(plain.encode())
        return f"{body}.{self._mac(body)}"

    def verify(self, token: str, now_s: float) -> LeaseClaims:
        """The claims of a token; BadToken where it was forged or came too late."""
        body, _, mac = token.rpartition(".")
        right = len(token) <= _MOST_CHARACTERS and token.isascii()
        if not right or not hmac.compare_digest(mac, self._mac(body)):
            raise BadToken("it was not signed by this cluster")
        try:
            claims = _CLAIMS.from_plain(json.loads(urlsafe_b64decode(body + "==")))
        except (ValueError, BadValue) as error:  # another version signed it
            raise BadToken(f"it claims what nobody here understands: {error}") from error
        if now_s >= claims.expires_s:
            raise BadToken(f"it expired {now_s - claims.expires_s:.1f} s ago", late=True)
        return claims

    def _mac(self, body: str) -> str:
        return _text(hmac.digest(self._key, body.encode(), "sha256"))


def sign(claims: LeaseClaims, secret: bytes) -> str:
    """A token for these claims, under a cluster's secret."""
    return LeaseTokens(secret).sign(claims)


def verify(token: str, secret: bytes, now_s: float) -> LeaseClaims:
    """The claims of a token under a cluster's secret; BadToken where it was forged or is late."""
    return LeaseTokens(secret).verify(token, now_s)


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
