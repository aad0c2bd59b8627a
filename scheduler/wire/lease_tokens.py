"""Signed lease tokens: what a caller presents to a GPU manager to use its lease."""

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from itertools import accumulate

from msgspec import json

from cache_manager.model.ids import GpuId, NodeId
from scheduler.model.errors import BadToken, BadValue
from scheduler.model.values import Few, LeaseId, Number, RequestId, SlotId, Value
from scheduler.wire.codec import encoded, read

_MOST_CHARACTERS = 4096
# The most bytes of addresses in a token, which has to fit into a header with its other fields.
_MOST_ADDRESS_CHARACTERS = 1024


class LeaseClaims(Value, frozen=True):
    """Who may use which lease, and until when the use may begin, in seconds since 1970.

    `function` is `tenant/function`; `term` is that of the leader that gave the lease; `addresses`
    are those of the node's GPU manager, as far as the signer knew them: signed, so that a caller
    cannot change them. A lease that `stands` is for several requests, one after the other.
    With `ahead` the node lets calls of the function in without being shown the token.
    """

    lease: LeaseId
    request: RequestId
    function: str
    node: NodeId
    gpu: GpuId
    slot: SlotId
    term: int
    expires_s: Number
    addresses: Few[str] = ()
    stands: bool = False
    ahead: bool = False


_CLAIMS = json.Decoder(LeaseClaims)


class LeaseTokens:
    """Signs and reads the tokens of one cluster."""

    def __init__(self, secret: bytes) -> None:
        self._begun_mac = hmac.new(derived_key(secret, "lease tokens"), digestmod="sha256")

    def sign(self, claims: LeaseClaims) -> str:
        """A token for these claims: text that fits into an HTTP header."""
        body = _text(encoded(claims))
        return f"{body}.{self._mac(body)}"

    def verify(self, token: str, now_s: float) -> LeaseClaims:
        """The claims of a token; BadToken if the token is forged or expired."""
        body, _, mac = token.rpartition(".")
        right = len(token) <= _MOST_CHARACTERS and token.isascii()
        if not right or not hmac.compare_digest(mac, self._mac(body)):
            raise BadToken("it was not signed by this cluster")
        try:
            claims = read(_CLAIMS, urlsafe_b64decode(body + "=="))
        except (ValueError, BadValue) as error:
            raise BadToken(f"its claims cannot be read: {error}") from error
        if now_s >= claims.expires_s:
            raise BadToken(f"it expired {now_s - claims.expires_s:.1f} s ago", late=True)
        return claims

    def _mac(self, body: str) -> str:
        mac = self._begun_mac.copy()  # a new one takes OpenSSL three times as long
        mac.update(body.encode())
        return _text(mac.digest())


def addresses_for_token(addresses: Sequence[str]) -> tuple[str, ...]:
    """As many of these addresses as fit, the first ones first."""
    ends = accumulate(len(encoded(address)) + 1 for address in addresses)
    placed = zip(addresses, ends, strict=True)
    return tuple(address for address, end in placed if end <= _MOST_ADDRESS_CHARACTERS)


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def derived_key(secret: bytes, purpose: str) -> bytes:
    """The key for one purpose; it reveals neither the secret nor another key."""
    return hmac.digest(secret, f"gpufaas: {purpose}".encode(), "sha256")
