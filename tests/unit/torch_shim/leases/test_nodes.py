"""Which GPU manager the shim goes to, of those at some addresses; and how long it stays there."""

import asyncio
import base64
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache_manager.model.ids import GpuId, NodeId
from common.addresses import TcpAddress, UnixAddress
from gpu_manager.node.leases import LeaseTimes
from scheduler.model.values import LeaseId, RequestId, SlotId
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens
from tests.kit.nodes.manager_client import Manager, manager, weights
from tests.kit.waiting import eventually
from tests.kit.worlds.cluster_in_process import SECRET
from torch_shim.errors import ConnectionLost, ManagerUnreachable, RemoteFailure
from torch_shim.leases import managers, request_context
from torch_shim.leases.managers import Nodes
from torch_shim.wire.manager_session import ManagerSession, ModelLease

pytestmark = pytest.mark.timeout(180, func_only=True)

LOCALHOST = TcpAddress("127.0.0.1", 0)


def nodes_of(it: Manager, own: str | None = None, idle_s: float = 60.0) -> Nodes:
    return Nodes(own or it.address, it.credential(), idle_s)


async def reach(nodes: Nodes, *addresses: str, node: str = "node") -> ManagerSession:
    return await asyncio.to_thread(nodes.reach, addresses, node)


def shared_secret(folder: Path) -> Path:
    """The cluster's, as a manager reads it."""
    found = folder / "secret"
    found.touch(mode=0o600)
    found.write_bytes(SECRET)
    return found


def token(
    *addresses: str, node: str = "n9", function: str = "team/function", in_s: float = 60.0
) -> str:
    """What a scheduler signs for a lease on this node, which listens at these addresses."""
    claims = LeaseClaims(
        LeaseId(1),
        RequestId("r"),
        function,
        NodeId(node),
        GpuId("g"),
        SlotId("s"),
        1,
        time.time() + in_s,
        addresses,
    )
    return LeaseTokens(SECRET).sign(claims)


def made_up(node: str) -> str:
    """What anybody can write."""
    body = base64.urlsafe_b64encode(json.dumps({"node": node}).encode()).rstrip(b"=").decode()
    return f"{body}.mac"


@pytest.mark.parametrize(
    ("shown", "failure"),
    [
        (lambda: made_up("n9"), "not allowed"),
        (lambda: token(function="team/other"), "not allowed"),
        (lambda: token(in_s=-1.0), "lease not in force"),
        (token, "lease not in force"),  # signed before tokens contained addresses
    ],
)
async def test_address_of_a_caller_is_not_dialled_whatever_token_it_shows(
    tmp_path: Path, shown: Callable[[], str], failure: str
) -> None:
    secret_file = shared_secret(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as evil:
        async with manager(secret_file=secret_file) as it:
            nodes = nodes_of(it)
            given = request_context.given(
                (f"tcp:127.0.0.1:{evil.getsockname()[1]}", it.address), shown()
            )
            with pytest.raises(RemoteFailure) as refused:
                await asyncio.to_thread(nodes.holder, given.token, given.claims.node)
            assert refused.value.failure == failure
            nodes.close()
        evil.setblocking(False)
        with pytest.raises(BlockingIOError):
            evil.accept()


async def test_node_is_found_at_the_addresses_that_were_signed_whatever_its_caller_says(
    tmp_path: Path,
) -> None:
    secret_file = shared_secret(tmp_path)
    async with (
        manager(name="n0", secret_file=secret_file) as own,
        manager(name="n9", listen=(LOCALHOST,), secret_file=secret_file) as far,
    ):
        with socket.create_server(("127.0.0.1", 0)) as evil:
            nodes = nodes_of(own)
            given = request_context.given(
                (f"tcp:127.0.0.1:{evil.getsockname()[1]}",), token(far.address)
            )
            found = await asyncio.to_thread(nodes.holder, given.token, given.claims.node)
            assert (found.address, await asyncio.to_thread(lambda: found.node)) == (
                far.address,
                "n9",
            )
            nodes.close()
            evil.setblocking(False)
            with pytest.raises(BlockingIOError):
                evil.accept()


@pytest.mark.parametrize(
    "shown", [token(node="node"), made_up("node"), "x"], ids=["signed", "made up", "none"]
)
async def test_own_manager_is_taken_without_asking_when_a_token_names_its_node_or_none(
    tmp_path: Path, shown: str
) -> None:
    async with manager(secret_file=shared_secret(tmp_path)) as it:
        nodes = nodes_of(it)
        given = request_context.given(("tcp:198.51.100.1:1",), shown)
        assert await asyncio.to_thread(lambda: nodes.own.node) == "node"
        said = nodes.own.control.wire.sent_bytes
        assert await asyncio.to_thread(nodes.holder, given.token, given.claims.node) is nodes.own
        assert nodes.own.control.wire.sent_bytes == said
        nodes.close()


async def test_own_session_is_taken_when_it_is_the_named_node_under_another_address() -> None:
    own = UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}")
    async with manager(listen=(own, LOCALHOST)) as it:
        nodes = nodes_of(it)
        tcp = str(it.node.addresses[1])
        assert await reach(nodes, "tcp:198.51.100.1:1", it.address) is nodes.own
        assert await reach(nodes, tcp) is nodes.own
        nodes.close()


async def test_socket_on_this_machine_goes_first_when_there_is_one(tmp_path: Path) -> None:
    async with (
        manager() as own,
        manager(listen=(UnixAddress(str(tmp_path / "far.sock")), LOCALHOST)) as far,
    ):
        nodes = Nodes(own.address, far.credential())
        unix, tcp = map(str, far.node.addresses)
        gone = f"unix:{tmp_path / 'gone.sock'}"
        found = await reach(nodes, tcp, gone, unix)
        assert found.address == unix
        assert await reach(nodes, gone, tcp) is not found
        assert await reach(nodes, gone, tcp) is await reach(nodes, tcp)
        nodes.close()


@pytest.mark.parametrize("where", ["another node", "nobody", "nowhere"])
async def test_trouble_is_told_when_the_node_is_not_there(tmp_path: Path, where: str) -> None:
    async with manager(listen=(LOCALHOST,)) as it:
        nodes = Nodes(f"unix:{tmp_path / 'own.sock'}", it.credential())
        addresses = {"another node": it.address, "nobody": "tcp:127.0.0.1:1"}
        with pytest.raises(ManagerUnreachable) as raised:
            await reach(nodes, *[addresses[where]] if where in addresses else [], node="n9")
        assert "n9" in str(raised.value)
        assert ("is node node" in str(raised.value)) == (where == "another node")
        nodes.close()


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Once it is set, sessions are idle whose time is over: none before, however slow a test is."""
    found = threading.Event()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() if found.is_set() else 0.0)
    monkeypatch.setattr(managers, "time", clock)
    return found


async def test_session_elsewhere_is_forgotten_when_it_is_idle_and_another_one_is_made(
    idle: threading.Event,
) -> None:
    async with manager() as own, manager(listen=(LOCALHOST,)) as far:
        nodes = Nodes(own.address, far.credential(), idle_s=0.2)
        session = await reach(nodes, far.address)
        assert await asyncio.to_thread(lambda: session.node) == "node"

        idle.set()
        await eventually(lambda: not others(nodes))  # it must not grow for ever

        assert not session.connected
        with pytest.raises(ConnectionLost, match="the idle session with"):
            await asyncio.to_thread(lambda: session.control)
        idle.clear()
        another = await reach(nodes, far.address)
        assert another is not session
        assert await asyncio.to_thread(lambda: another.node) == "node"
        nodes.close()


async def test_address_where_nobody_answers_is_forgotten(
    tmp_path: Path, idle: threading.Event
) -> None:
    nodes = Nodes(f"unix:{tmp_path / 'own.sock'}", "", idle_s=0.1)
    with pytest.raises(ManagerUnreachable):
        await reach(nodes, "tcp:127.0.0.1:1")
    assert others(nodes)  # it was tried
    idle.set()
    await eventually(lambda: not others(nodes))
    nodes.close()


async def test_node_is_reached_when_its_idle_session_is_closed_just_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret_file = shared_secret(tmp_path)
    async with (
        manager(name="n0", secret_file=secret_file) as own,
        manager(name="n9", listen=(LOCALHOST,), secret_file=secret_file) as far,
    ):
        nodes = nodes_of(own)
        idle = await reach(nodes, far.address, node="n9")
        node_of = vars(ManagerSession)["node"].fget

        def node_once_swept(session: ManagerSession) -> str:
            idle.retire_if_idle(float("inf"))
            return str(node_of(session))

        monkeypatch.setattr(ManagerSession, "node", property(node_once_swept))
        again = await reach(nodes, far.address, node="n9")
        assert idle.retired
        assert again.connected
        nodes.close()


async def test_session_elsewhere_stays_when_a_call_is_under_way() -> None:
    async with manager(listen=(LOCALHOST,)) as far:
        session = ManagerSession(far.address, far.credential())
        await asyncio.to_thread(lambda: session.control)
        session.calls = 1  # as `channel` counts it
        assert not session.retire_if_idle(float("inf"))
        assert session.connected
        session.calls = 0  # and `give`
        assert session.retire_if_idle(float("inf"))
        assert not session.connected


async def test_channels_that_only_a_burst_needed_are_closed_but_for_one() -> None:
    """At the worker's end: the manager has two sockets for each, and the worker a thread."""
    own = UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}")
    async with manager(listen=(own, LOCALHOST), leases=LeaseTimes(linger_s=120.0)) as it:
        client, image = await it.client(), weights(b"weights")
        await client.upload(image)
        nodes = nodes_of(it, str(it.node.addresses[1]), idle_s=0.4)
        session = nodes.own
        lease = await asyncio.to_thread(session.acquire, image.digest, 1)
        assert isinstance(lease, ModelLease)
        channels = [await asyncio.to_thread(session.channel, lease, 1) for _ in range(4)]
        (worker,) = it.runtime.hosted
        await eventually(lambda: len(worker.channels) == 4)
        ends = [end for _, _, end in worker.channels]
        for channel in channels:
            assert channel is not None, "the lease is in force"
            session.give(lease, channel)
        assert lease.peer.has_unused
        nodes.sweep_later()  # as the next call has it done

        await eventually(lambda: sum(map(is_closed, ends)) == 3)

        last = channels[-1]
        assert last is not None
        assert not last.broken, "the one that was used last is used next"
        assert session.connected
        nodes.close()
        image.close()


def is_closed(end: socket.socket) -> bool:
    """Whether the other side has closed, which sends nothing here."""
    end.setblocking(False)
    try:
        return end.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def others(nodes: Nodes) -> int:
    """How many sessions with other nodes' managers there are."""
    return len(nodes._others)  # noqa: SLF001 - nothing else needs to know
