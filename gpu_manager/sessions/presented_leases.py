"""Leases that a function's caller acquired, and that the function presents as tokens."""

import asyncio
import logging
import time

from cache_manager.model.ids import ModelId
from gpu_manager.errors import ClientNotAllowed
from gpu_manager.node.leases_in_force import EndReason, LeaseInForce
from gpu_manager.node.node import GpuNode
from gpu_manager.sessions.sessions import ClientSession
from scheduler.api import BadToken, LeaseClaims, LeaseTokens, RequestId

log = logging.getLogger(__name__)

# The token comes with the request, the grant from the scheduler: the grant may be this much later.
_GRANT_DELAY_S = 2.0
# A token's expiry limits the claim of its lease, but not the use of its request's id.
_NEVER_EXPIRED_S = float("-inf")


class PresentedLeases:
    """Finds the lease of a token, if the token belongs to the session's function."""

    def __init__(self, node: GpuNode, tokens: LeaseTokens) -> None:
        self._node = node
        self._tokens = tokens

    async def lease(
        self, session: ClientSession, token: str, models: tuple[ModelId, ...]
    ) -> tuple[LeaseInForce, RequestId] | None:
        """Return the lease once it is in force, and the request that the token names.

        None if it has ended or lacks these models. Raise ClientNotAllowed if the token is forged,
        or belongs to another function.
        """
        claims = self._claims(session, token, time.time())
        if claims is None or claims.node != self._node.name:
            return None
        held = await self._arrived(claims)
        if held is None or held.ending is not None:
            return None
        if not set(models) <= set(held.models):
            self._release_unfit(held, claims.request)
            return None
        return (held, claims.request) if held.is_free_for(session.key, claims.request) else None

    def claims(self, session: ClientSession, token: str) -> LeaseClaims | None:
        """Return a token's claims about its lease, on any node; None if the token has expired.

        Raise ClientNotAllowed if the token is forged, or belongs to another function.
        """
        return self._claims(session, token, time.time())

    def request(self, session: ClientSession, token: str) -> RequestId:
        """Return the request of a token, even if its lease was given back long ago.

        Raise ClientNotAllowed if the token is forged, or belongs to another function.
        """
        claims = self._claims(session, token, _NEVER_EXPIRED_S)
        assert claims is not None, "no token expires at minus infinity"
        return claims.request

    def _release_unfit(self, held: LeaseInForce, request: RequestId) -> None:
        """Release an unclaimed lease that lacks the models that its request needs.

        Otherwise as many such requests as there are GPUs would block each other.
        """
        claim = held.claim_of(request)
        if claim is not None and claim.holder is None:
            self._node.give_back(held, (request,), EndReason.UNFIT)

    def _claims(self, session: ClientSession, token: str, now_s: float) -> LeaseClaims | None:
        try:
            claims = self._tokens.verify(token, now_s)
        except BadToken as error:
            if error.late:
                log.info("a lease token of %s has expired: %s", session.identity, error)
                return None
            raise ClientNotAllowed(f"the lease token is not valid: {error}") from error
        if claims.function != str(session.identity):
            raise ClientNotAllowed(f"the lease token belongs to {claims.function}")
        return claims

    async def _arrived(self, claims: LeaseClaims) -> LeaseInForce | None:
        """Wait for the lease's grant; return None if the lease has ended or is not granted."""
        loop, leases = asyncio.get_running_loop(), self._node.leases
        deadline_s = loop.time() + _GRANT_DELAY_S
        while leases.get(claims.lease) is None and leases.latest < claims.lease:
            if not await self._node.granted.wait(deadline_s - loop.time()):
                break
        found = leases.get(claims.lease)
        if found is None:
            leases.patience.asked_for(claims.lease, loop.time())
        return found
