"""Which GPU manager the shim goes to, of those at some addresses; and how long it stays there."""

import asyncio
import secrets
from pathlib import Path

import pytest

from gpu_manager.api import TcpAddress, UnixAddress
from tests.cluster import soon
from tests.manager_client import Manager, manager, really
from torch_shim.client import Session
from torch_shim.errors import Unreachable
from torch_shim.nodes import Nodes

LOCALHOST = TcpAddress("127.0.0.1", 0)


def nodes_of(it: Manager, own: str | None = None, idle_s: float = 60.0) -> Nodes:
    return Nodes(own or it.address, it.credential(), idle_s)


async def reach(nodes: Nodes, *addresses: str, node: str | None = "node") -> Session:
    return await asyncio.to_thread(nodes.reach, addresses, node)


@really
async def test_own_session_is_taken_when_it_is_the_named_node_under_another_address() -> None:
    own = UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}")
    async with manager(listen=(own, LOCALHOST)) as it:
        nodes = nodes_of(it)
        tcp = str(it.node.addresses[1])
        assert await reach(nodes, "tcp:198.51.100.1:1", it.address) is nodes.own
        assert await reach(nodes, tcp) is nodes.own
        assert await reach(nodes, it.address, node=None) is nodes.own
        nodes.close()


@really
async def test_socket_on_this_machine_goes_first_when_there_is_one(tmp_path: Path) -> None:
    async with (
        manager() as own,
        manager(listen=(UnixAddress(str(tmp_path / "far.sock")), LOCALHOST)) as far,
    ):
        nodes = Nodes(own.address, far.credential())
        unix, tcp = map(str, far.node.addresses)
        gone = f"unix:{tmp_path / 'gone.sock'}"
        found = await reach(nodes, tcp, gone, unix, node=None)
        assert found.address == unix
        assert await reach(nodes, gone, tcp, node=None) is not found
        assert await reach(nodes, gone, tcp, node=None) is await reach(nodes, tcp, node=None)
        nodes.close()


@pytest.mark.parametrize("where", ["another node", "nobody", "nowhere"])
def test_trouble_is_told_when_the_node_is_not_there(tmp_path: Path, where: str) -> None:
    @really
    async def try_it() -> None:
        async with manager(listen=(LOCALHOST,)) as it:
            nodes = Nodes(f"unix:{tmp_path / 'own.sock'}", it.credential())
            addresses = {"another node": it.address, "nobody": "tcp:127.0.0.1:1"}
            with pytest.raises(Unreachable) as told:
                await reach(nodes, *[addresses[where]] if where in addresses else [], node="n9")
            assert "n9" in str(told.value)
            assert ("is node node" in str(told.value)) == (where == "another node")
            nodes.close()

    try_it()


@really
async def test_session_elsewhere_is_closed_when_it_is_idle_and_made_anew_when_it_is_used() -> None:
    async with manager() as own, manager(listen=(LOCALHOST,)) as far:
        nodes = Nodes(own.address, far.credential(), idle_s=0.2)
        session = await reach(nodes, far.address, node=None)
        assert await asyncio.to_thread(lambda: session.node) == "node"
        first = session.name

        await soon(lambda: not session.connected)

        assert await asyncio.to_thread(lambda: session.control.lost) is None
        assert session.name != first
        assert await reach(nodes, far.address, node=None) is session
        await soon(lambda: not session.connected)
        nodes.close()


@really
async def test_session_elsewhere_stays_when_a_call_is_under_way() -> None:
    async with manager(listen=(LOCALHOST,)) as far:
        session = Session(far.address, far.credential())
        await asyncio.to_thread(lambda: session.control)
        session._calls = 1  # noqa: SLF001 - as `channel` counts it
        session.close_if_idle(float("inf"))
        assert session.connected
        session._calls = 0  # noqa: SLF001 - and `give`
        session.close_if_idle(float("inf"))
        assert not session.connected
