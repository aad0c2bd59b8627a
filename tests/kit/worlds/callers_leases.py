"""Leases that a function's caller has, and the tokens by which the function shows them."""

import asyncio
import os
import time

from scheduler.model.values import Placement, Request, RequestId
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens
from tests.kit.nodes.manager_client import ManagerClient, SealedWeights, weights
from tests.kit.worlds.cluster_in_process import SECRET, Scheduler
from tests.kit.worlds.joined_manager import Joined, model_of


def given(
    it: Scheduler, image: SealedWeights, name: str = "gateway/1", caller: str = ""
) -> asyncio.Future[Placement]:
    """A gateway's request for a GPU for this function; the lease of one that is named stands."""
    request = Request(RequestId(name), "team/function", (model_of(image),), caller=caller)
    return asyncio.ensure_future(it.driver.acquire(request))


def token(
    placement: Placement,
    *,
    function: str = "team/function",
    in_s: float = 60.0,
    ahead: bool = False,
    request: str = "gateway/1",
) -> str:
    """What the gateway hands to the function."""
    claims = LeaseClaims(
        lease=placement.lease,
        request=RequestId(request),
        function=function,
        node=placement.node,
        gpu=placement.gpu,
        slot=placement.slot,
        term=1,
        expires_s=time.time() + in_s,
        stands=placement.stands is not None,
        ahead=ahead,
    )
    return LeaseTokens(SECRET).sign(claims)


async def uploaded(node: Joined) -> tuple[ManagerClient, SealedWeights]:
    image = weights(os.urandom(1000))
    client = await node.client()
    await client.upload(image)
    return client, image
