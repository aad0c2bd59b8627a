"""Leases that were given to a function's caller, and that the function presents as tokens."""

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

# The token travels with the request, the grant from the scheduler: so long may it be behind.
_BEHIND_S = 2.0
# A token says until when its lease may be claimed; what becomes of its request has no such end.
_NEVER_LATE_S = float("-inf")


class PresentedLeases:
    """Finds the lease of a token, for the function that it was given to."""

    def __init__(self, node: GpuNode, tokens: LeaseTokens) -> None:
        self._node = node
        self._tokens = tokens

    async def lease(
        self, session: ClientSession, token: str, models: tuple[ModelId, ...]
    ) -> LeaseInForce | None:
        """The lease, once it is in force; None where it has ended, or is of no use for these.

        NotAllowed where the token is forged, or was given to another function.
        """
        claims = self._claims(session, token, time.time())
        if claims is None or claims.node != self._node.name:
            return None
        held = await self._arrived(claims)
        if held is None or held.ending is not None:
            return None
        if not set(models) <= set(held.models):
            self._unfit(held)
            return None
        return held if held.holder in (None, session.key) else None

    def claims(self, session: ClientSession, token: str) -> LeaseClaims | None:
        """What a token says of its lease, on whatever node that is; None where it came too late.

        NotAllowed where the token is forged, or was given to another function.
        """
        return self._claims(session, token, time.time())

    def request(self, session: ClientSession, token: str) -> RequestId:
        """The request that a token was given for; its lease may have been given back long ago.

        NotAllowed where the token is forged, or was given to another function.
        """
        claims = self._claims(session, token, _NEVER_LATE_S)
        assert claims is not None, "no token expired before its cluster was there"
        return claims.request

    def _unfit(self, held: LeaseInForce) -> None:
        """A request for other models must not keep others from a GPU while it waits for one.

        As many such calls as there are GPUs would wait for each other.
        """
        if held.holder is None:
            self._node.release(held, EndReason.UNFIT)

    def _claims(self, session: ClientSession, token: str, now_s: float) -> LeaseClaims | None:
        try:
            claims = self._tokens.verify(token, now_s)
        except BadToken as error:
            if error.late:
                log.info("%s came late: %s", session.identity, error)
                return None
            raise ClientNotAllowed(f"a lease token: {error}") from error
        if claims.function != str(session.identity):
            raise ClientNotAllowed(f"a lease token of {claims.function}")
        return claims

    async def _arrived(self, claims: LeaseClaims) -> LeaseInForce | None:
        """The lease, or None when it has ended or does not come."""
        loop, leases = asyncio.get_running_loop(), self._node.leases
        deadline_s = loop.time() + _BEHIND_S
        while leases.get(claims.lease) is None and leases.latest < claims.lease:
            if not await self._node.granted.within(deadline_s - loop.time()):
                break
        return leases.get(claims.lease)
