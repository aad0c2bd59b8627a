"""Which weights the shim need not bring again: by session, and no longer than that lasts."""

import asyncio
import gc
import secrets

import pytest

from common.addresses import UnixAddress
from tests.kit.nodes.manager_client import manager
from torch_shim.weights import Accepted
from torch_shim.wire.manager_session import ManagerSession

pytestmark = pytest.mark.timeout(180, func_only=True)


def a_session() -> ManagerSession:
    return ManagerSession("unix:@gpufaas-nobody", "")


def test_weights_are_known_to_the_session_that_accepted_them_alone() -> None:
    one, other, found = a_session(), a_session(), Accepted()
    found.add("a", one, one.name)
    assert found.has("a", one)
    assert not found.has("b", one)
    assert not found.has("a", other)
    found.forget("a")
    assert not found.has("a", one)


async def test_weights_are_brought_anew_when_a_session_lost_its_connection() -> None:
    async with manager(listen=(UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}"),)) as it:
        session, found = ManagerSession(it.address, it.credential()), Accepted()
        name = await asyncio.to_thread(lambda: session.control.session)
        found.add("a", session, name)
        assert found.has("a", session)
        session.close()
        assert not found.has("a", session)
        found.add("b", session, session.name)
        found.add("c", session, session.name)
        assert found.has("b", session)
        assert not found.has("a", session)
        session.close()


def test_nothing_is_kept_of_sessions_that_are_over() -> None:
    found, sessions = Accepted(), [a_session() for _ in range(100)]
    for session in sessions:
        found.add("a", session, session.name)
    assert found.sessions == 100
    sessions.clear()
    session = a_session()
    gc.collect()
    assert not found.sessions  # it must not grow for ever


def test_no_more_than_so_many_are_known_of_one_session() -> None:
    session, found = a_session(), Accepted()
    for number in range(1000):
        found.add(str(number), session, session.name)
        if not found.has("0", session):
            break
    assert 1 < number < 999  # it must not grow for ever
    assert found.has("1", session)
    assert found.has(str(number), session)
