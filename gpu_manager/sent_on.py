"""Leases on other nodes that were given to functions of this one: they are sent there."""

import time
from collections import deque
from typing import Any

from gpu_manager.errors import PlacedElsewhere
from gpu_manager.leases import SessionKey
from gpu_manager.ports import Neighbours, Scheduling
from gpu_manager.sessions import Session
from scheduler.api import LeaseClaims, LeaseId, LeaseTokens, Placement, RequestId

# The last ones of a session, which it may not have come for when it ends.
_REMEMBERED = 8


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
        self._leases: dict[SessionKey, deque[LeaseId]] = {}

    def answer(self, session: Session, request: RequestId, placement: Placement) -> dict[str, Any]:
        """What the session needs to find the lease; PlacedElsewhere where nobody says where."""
        neighbours = self._neighbours
        addresses = () if neighbours is None else neighbours.addresses_of(placement.node)
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
        )
        known = self._leases.setdefault(session.key, deque(maxlen=_REMEMBERED))
        known.append(placement.lease)
        token = self._tokens.sign(claims)
        return {"node": placement.node, "addresses": list(addresses), "token": token}

    def given_back(self, placement: Placement) -> PlacedElsewhere:
        """Nobody can go there: the lease ends."""
        self._scheduling.release(placement.lease)
        return PlacedElsewhere(placement.models[0], placement.node)

    def release(self, session: Session, lease: LeaseId) -> None:
        """The session did not get there, or needs it no more."""
        known = self._leases.get(session.key, ())
        if lease in known:
            self._scheduling.release(lease)

    def ended(self, session: Session) -> None:
        """The session is gone: what it did not come for ends now, and not when somebody notices."""
        for lease in self._leases.pop(session.key, ()):
            self._scheduling.release(lease)
