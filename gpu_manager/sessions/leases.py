"""Leases that this node got for its sessions on other nodes."""

import time
from typing import Any

from gpu_manager.attachment.attachment import Attachment
from gpu_manager.attachment.scheduling import Scheduling
from gpu_manager.errors import PlacedElsewhere
from gpu_manager.node.leases import SessionKey
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

# The number of unclaimed leases remembered for a session; older ones are forgotten.
REMEMBERED = 64
# After this time a lease counts as claimed, even without a report: the other node ends it when the
# session there ends, or if no session claims it.
UNREPORTED_S = 30.0


# A lease, and the request that has it, perhaps with others.
_Part = tuple[LeaseId, RequestId]


class LeasesElsewhere:
    """Sends sessions to leases on other nodes, and ends leases that they do not claim there."""

    def __init__(
        self,
        scheduling: Scheduling,
        tokens: LeaseTokens,
        neighbours: Attachment | None,
        token_s: float,
    ) -> None:
        self._scheduling = scheduling
        self._tokens = tokens
        self._neighbours = neighbours
        self._token_s = token_s
        # Leases that may be unclaimed, with the time of the answer to the session; oldest first.
        self._leases: dict[SessionKey, dict[_Part, float]] = {}

    def __len__(self) -> int:
        return sum(len(parts) for parts in self._leases.values())

    def answer(
        self, session: ClientSession, request: RequestId, placement: Placement
    ) -> dict[str, Any]:
        """Return the lease's node, addresses and token; raise PlacedElsewhere without addresses."""
        neighbours = self._neighbours
        addresses = self.addresses_of(placement.node)
        if neighbours is None or not addresses:
            self._scheduling.release(placement.lease, request)
            raise PlacedElsewhere(placement.models[0], placement.node)
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
        self._remember(session.key, (placement.lease, request))
        token = self._tokens.sign(claims)
        return {"node": placement.node, "addresses": list(addresses), "token": token}

    def addresses_of(self, node: NodeId) -> tuple[str, ...]:
        return () if self._neighbours is None else self._neighbours.addresses_of(node)

    def claimed(
        self, session: ClientSession, lease: LeaseId, request: RequestId | None = None
    ) -> None:
        """Forget a lease that the session has claimed: from now on the other node ends it."""
        self._forget(session.key, lease, request)

    def release(
        self, session: ClientSession, lease: LeaseId, request: RequestId | None = None
    ) -> None:
        """Give back a lease that the session did not reach, or no longer needs."""
        for part in self._forget(session.key, lease, request):
            self._scheduling.release(*part)

    def end_session(self, session: ClientSession) -> None:
        since_s = time.monotonic() - UNREPORTED_S
        for part, answered_s in self._leases.pop(session.key, {}).items():
            if answered_s > since_s:
                self._scheduling.release(*part)

    def _remember(self, key: SessionKey, part: _Part) -> None:
        parts = self._leases.setdefault(key, {})
        parts[part] = time.monotonic()
        if len(parts) > REMEMBERED:
            del parts[next(iter(parts))]

    def _forget(self, key: SessionKey, lease: LeaseId, request: RequestId | None) -> list[_Part]:
        """Forget an unclaimed lease, of all requests if none is named; return what was known."""
        parts = self._leases.get(key, {})
        forgotten = [part for part in parts if part[0] == lease and request in (None, part[1])]
        for part in forgotten:
            del parts[part]
        if not parts:
            self._leases.pop(key, None)
        return forgotten
