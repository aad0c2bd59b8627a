"""Lease tokens: what was signed is read, and nothing else."""

import base64
import hmac
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, NodeId
from scheduler.model.errors import BadToken
from scheduler.model.values import LeaseId, RequestId, SlotId
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens, addresses_for_token, derived_key

SECRET = b"a secret of the cluster"
CLAIMS = LeaseClaims(
    lease=LeaseId(7 << 32),
    request=RequestId("r1"),
    function="team/résumé",
    node=NodeId("n0"),
    gpu=GpuId("n0/cuda:0"),
    slot=SlotId("n0/cuda:0"),
    term=7,
    expires_s=1000.0,
)


@given(
    claims=st.from_type(LeaseClaims).filter(lambda claims: claims.expires_s > 0.0),
    addresses=st.lists(st.text(max_size=20), max_size=3).map(tuple),
)
def test_claims_are_the_same_when_a_token_is_read(
    claims: LeaseClaims, addresses: tuple[str, ...]
) -> None:
    claims = replace(claims, addresses=addresses)
    token = LeaseTokens(SECRET).sign(claims)
    assert LeaseTokens(SECRET).verify(token, 0.0) == claims
    assert token.isascii()
    assert not set(token) & set(" \t\r\n,;\"'")


def test_token_is_refused_when_it_has_expired() -> None:
    token = LeaseTokens(SECRET).sign(CLAIMS)
    assert LeaseTokens(SECRET).verify(token, 999.9) == CLAIMS
    with pytest.raises(BadToken, match=r"5\.0 s") as refused:
        LeaseTokens(SECRET).verify(token, 1005.0)
    assert refused.value.late


def test_token_is_refused_when_another_cluster_signed_it() -> None:
    with pytest.raises(BadToken, match="not signed"):
        LeaseTokens(SECRET).verify(LeaseTokens(b"another secret").sign(CLAIMS), 0.0)


def test_token_is_refused_when_any_character_of_it_was_changed() -> None:
    token = LeaseTokens(SECRET).sign(CLAIMS)
    for index, character in enumerate(token[:-1]):  # the last one has two unused bits
        other = "B" if character == "A" else "A"
        with pytest.raises(BadToken):
            LeaseTokens(SECRET).verify(token[:index] + other + token[index + 1 :], 0.0)


@given(text=st.text(max_size=200))
def test_anything_is_refused_when_it_is_no_token(text: str) -> None:
    with pytest.raises(BadToken):
        LeaseTokens(SECRET).verify(text, 0.0)
    with pytest.raises(BadToken):
        LeaseTokens(SECRET).verify(f"{text}.{text}", 0.0)


def test_token_is_refused_when_it_claims_what_this_version_does_not_know() -> None:
    body = base64.urlsafe_b64encode(json.dumps({"lease": 1}).encode()).rstrip(b"=").decode()
    key = derived_key(SECRET, "lease tokens")
    mac = base64.urlsafe_b64encode(hmac.digest(key, body.encode(), "sha256")).rstrip(b"=")
    with pytest.raises(BadToken, match="its claims cannot be read"):
        LeaseTokens(SECRET).verify(f"{body}.{mac.decode()}", 0.0)


def test_token_has_no_fields_at_their_default() -> None:
    claims = json.loads(
        base64.urlsafe_b64decode(LeaseTokens(SECRET).sign(CLAIMS).split(".")[0] + "==")
    )
    assert not {"addresses", "stands", "ahead"} & claims.keys()


def test_token_fits_into_a_header_when_a_node_has_many_long_addresses() -> None:
    addresses = tuple(f"unix:/{number}/{'a' * 95}" for number in range(20))
    carried = addresses_for_token(addresses)
    assert carried == addresses[:9]
    claims = replace(CLAIMS, addresses=carried)
    assert LeaseTokens(SECRET).verify(LeaseTokens(SECRET).sign(claims), 0.0) == claims
    assert addresses_for_token(["x" * 5000, "tcp:b:1"]) == ()


def test_keys_differ_when_their_purposes_do() -> None:
    keys = {derived_key(SECRET, purpose) for purpose in ("lease tokens", "node streams", "")}
    assert len(keys) == 3
    assert derived_key(b"another secret", "lease tokens") not in keys
