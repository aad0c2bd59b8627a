"""Leases on other nodes that were given to functions of this one: they are sent there."""

import time
from typing import Any

from gpu_manager.errors import PlacedElsewhere
from gpu_manager.leases import SessionKey
from gpu_manager.ports import Neighbours, Scheduling
from gpu_manager.sessions import Session
from scheduler.api import (
    LeaseClaims,
    LeaseId,
    LeaseTokens,
    NodeId,
    Placement,
    RequestId,
    addresses_for_token,
)

# The last ones of a session, which it may not have come for when it ends.
_REMEMBERED = 64
# A session that does not say when it came for one has done so by then, or will not: the other node
# ends the lease if its own session ends, or if nobody comes. This one does not know any more.
_UNSAID_S = 30.0


class SentOn:
    """Says where such a lease is, and ends it where its function does not get there."""

    def __init__(
        self,
        scheduling: Scheduling,
        tokens: LeaseTokens,
        neighbours: Neighbours | None,
        token_s: float,
    ) -> None:
        self._scheduling = scheduling
        self._tokens = tokens
        self._neighbours = neighbours
        self._token_s = token_s
        # Those that it may not have come for, and when it was told of them; the oldest one first.
        self._leases: dict[SessionKey, dict[LeaseId, float]] = {}

    def answer(self, session: Session, request: RequestId, placement: Placement) -> dict[str, Any]:
        """What the session needs to find the lease; PlacedElsewhere where nobody says where."""
        neighbours = self._neighbours
        addresses = self.addresses_of(placement.node)
        if neighbours is None or not addresses:
            raise self.given_back(placement)
        claims = LeaseClaims(
            lease=placement.lease,
            request=request,
            function=str(session.identity),
            node=placement.node,
            gpu=placement.gpu,
            slot=placement.slot,
            term=neighbours.term,
            expires_s=time.time() + self._token_s,
            addresses=addresses_for_token(addresses),
        )
        self._remember(session.key, placement.lease)
        token = self._tokens.sign(claims)
        return {"node": placement.node, "addresses": list(addresses), "token": token}

    def given_back(self, placement: Placement) -> PlacedElsewhere:
        """Nobody can go there: the lease ends."""
        self._scheduling.release(placement.lease)
        return PlacedElsewhere(placement.models[0], placement.node)

    def addresses_of(self, node: NodeId) -> tuple[str, ...]:
        """Where functions find another node; nothing where the scheduler has not said."""
        return () if self._neighbours is None else self._neighbours.addresses_of(node)

    def claimed(self, session: Session, lease: LeaseId) -> None:
        """The session has come for it: it is the other node's affair from now on."""
        self._forget(session.key, lease)

    def release(self, session: Session, lease: LeaseId) -> None:
        """The session did not get there, or needs it no more."""
        if self._forget(session.key, lease):
            self._scheduling.release(lease)

    def ended(self, session: Session) -> None:
        """The session is gone: what it did not come for ends now, and not when somebody notices."""
        since_s = time.monotonic() - _UNSAID_S
        for lease, told_s in self._leases.pop(session.key, {}).items():
            if told_s > since_s:
                self._scheduling.release(lease)

    def _remember(self, key: SessionKey, lease: LeaseId) -> None:
        known = self._leases.setdefault(key, {})
        known[lease] = time.monotonic()
        if len(known) > _REMEMBERED:
            del known[next(iter(known))]

    def _forget(self, key: SessionKey, lease: LeaseId) -> bool:
        """Whether the session was told of it, and did not say yet what became of it."""
        known = self._leases.get(key, {})
        if known.pop(lease, None) is None:
            return False
        if not known:
            del self._leases[key]
        return True
