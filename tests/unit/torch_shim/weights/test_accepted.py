"""Which weights the shim need not bring again: by session, and no longer than that lasts."""

import asyncio
import secrets
import sys
import threading
from typing import Any

import pytest

from common.addresses import UnixAddress
from tests.kit.nodes.manager_client import manager
from torch_shim.leases.leasing import ModelWeights
from torch_shim.leases.managers import Nodes
from torch_shim.weights import ModelImage, process_weights
from torch_shim.wire import manager_session
from torch_shim.wire.manager_session import ManagerSession

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


class Connected(ManagerSession):
    control: Any = None  # nobody is asked


def test_weights_are_remembered_while_other_threads_forget_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget() -> None:
        while not ended.is_set():
            for number in range(7):
                session.images.pop(str(number), None)

    monkeypatch.setattr(manager_session, "_MOST_IMAGES", 2)
    session, ended = Connected("unix:@gpufaas-nobody", ""), threading.Event()
    others = [threading.Thread(target=forget) for _ in range(2)]
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for other in others:
            other.start()
        for number in range(10_000):
            session.connected_images()[str(number % 7)] = None
    finally:
        ended.set()
        sys.setswitchinterval(usual_s)
        for other in others:
            other.join()
    assert len(session.images) <= 2


def test_weights_are_brought_again_when_a_node_has_lost_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = [ManagerSession("unix:@gpufaas-nobody", "") for _ in range(2)]
    brought: list[ManagerSession] = []

    def build(_: object, session: ManagerSession, __: object) -> ModelImage:
        brought.append(session)
        session.images["a"] = None
        return ModelImage("a", {})

    monkeypatch.setattr(process_weights, "build", build)
    weights = ModelWeights("a model", list)
    for _ in range(2):
        assert {weights.bring(session).digest for session in sessions} == {"a"}
    assert brought == sessions
    weights.forget(sessions)
    assert {weights.bring(session).digest for session in sessions} == {"a"}
    assert brought == sessions * 2
