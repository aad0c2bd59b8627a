"""Which weights the shim need not bring again: by session, and no longer than that lasts."""

import asyncio
import secrets

import pytest

from common.addresses import UnixAddress
from tests.kit.nodes.manager_client import manager
from torch_shim.leases.managers import Nodes

pytestmark = pytest.mark.timeout(180, func_only=True)


async def test_weights_are_brought_anew_when_a_session_lost_its_connection() -> None:
    async with manager(listen=(UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}"),)) as it:
        nodes = Nodes(it.address, it.credential())
        session = nodes.own
        images = await asyncio.to_thread(session.connected_images)
        images["a"] = None
        assert "a" in session.images
        session.close()
        assert "a" not in session.images
        again = await asyncio.to_thread(session.connected_images)
        images["a"] = None  # accepted by the connection that is lost
        assert "a" not in session.images
        again["a"] = None
        assert "a" in session.images
        nodes.forget_image("a")
        assert "a" not in session.images
        nodes.close()


async def test_no_more_than_so_many_are_known_of_one_session() -> None:
    async with manager(listen=(UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}"),)) as it:
        nodes = Nodes(it.address, it.credential())
        images = await asyncio.to_thread(nodes.own.connected_images)
        images |= dict.fromkeys(map(str, range(10_000)))
        kept = await asyncio.to_thread(nodes.own.connected_images)
        assert 1 < len(kept) < 9_999  # it must not grow for ever
        assert "9999" in kept
        nodes.close()
