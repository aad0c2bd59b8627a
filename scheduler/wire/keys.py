"""Keys for every purpose, derived from the one secret that a cluster shares."""

import hmac


def derived_key(secret: bytes, purpose: str) -> bytes:
    """The key for one purpose; it reveals neither the secret nor another key."""
    return hmac.digest(secret, f"gpufaas: {purpose}".encode(), "sha256")
