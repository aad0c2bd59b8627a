"""Leases on other nodes that the scheduler granted to functions connected to this one."""

import time
from typing import Any

from gpu_manager.attachment.scheduling import Neighbours, Scheduling
from gpu_manager.errors import PlacedElsewhere
from gpu_manager.node.leases_in_force import SessionKey
from gpu_manager.sessions.sessions import ClientSession
from scheduler.api import (
    LeaseClaims,
    LeaseId,
    LeaseTokens,
    NodeId,
    Placement,
    RequestId,
    addresses_for_token,
)

# Leases of a session that are remembered until it has claimed them, the latest ones.
REMEMBERED = 64
# A session that did not report its claim within this time has claimed the lease or never will: the
# other node ends it if its own session ends or nobody claims it.
UNSAID_S = 30.0


class LeasesElsewhere:
    """Tells a session where its lease is, and ends the lease if the session does not get there."""

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
        # Leases that may not be claimed yet, and when the session learned of them; oldest first.
        self._leases: dict[SessionKey, dict[LeaseId, float]] = {}

    def __len__(self) -> int:
        """Leases that may not be claimed yet."""
        return sum(len(known) for known in self._leases.values())

    def answer(
        self, session: ClientSession, request: RequestId, placement: Placement
    ) -> dict[str, Any]:
        """Where the session finds the lease; PlacedElsewhere where no address is known."""
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
        """End a lease that its session cannot reach."""
        self._scheduling.release(placement.lease)
        return PlacedElsewhere(placement.models[0], placement.node)

    def addresses_of(self, node: NodeId) -> tuple[str, ...]:
        """Where functions find another node; empty where the scheduler has not reported it."""
        return () if self._neighbours is None else self._neighbours.addresses_of(node)

    def claimed(self, session: ClientSession, lease: LeaseId) -> None:
        """The session has claimed it: from now on the other node ends it."""
        self._forget(session.key, lease)

    def release(self, session: ClientSession, lease: LeaseId) -> None:
        """The session did not reach it, or needs it no more."""
        if self._forget(session.key, lease):
            self._scheduling.release(lease)

    def ended(self, session: ClientSession) -> None:
        """The session is gone: the leases that it has not claimed end now."""
        since_s = time.monotonic() - UNSAID_S
        for lease, answered_s in self._leases.pop(session.key, {}).items():
            if answered_s > since_s:
                self._scheduling.release(lease)

    def _remember(self, key: SessionKey, lease: LeaseId) -> None:
        known = self._leases.setdefault(key, {})
        known[lease] = time.monotonic()
        if len(known) > REMEMBERED:
            del known[next(iter(known))]

    def _forget(self, key: SessionKey, lease: LeaseId) -> bool:
        """Whether the lease was remembered as not claimed."""
        known = self._leases.get(key, {})
        if known.pop(lease, None) is None:
            return False
        if not known:
            del self._leases[key]
        return True
