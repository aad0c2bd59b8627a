"""A lease that a call acquires itself is waited for as long as the call is, and no longer."""

import asyncio
import contextvars
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest

from gpu_manager.api import FunctionIdentity
from gpu_manager.attachment.attachment import Attachment
from gpu_manager.node.leases import LeaseTimes
from scheduler.model.events import RequestArrived
from scheduler.model.values import Placement, Request
from tests.kit.nodes.manager_client import SealedWeights
from tests.kit.waiting import eventually
from tests.kit.worlds.callers_leases import given, uploaded
from tests.kit.worlds.cluster_in_process import Scheduler, a_scheduler, leases_of
from tests.kit.worlds.joined_manager import joined
from torch_shim.errors import GpuUnavailable, RemoteFailure
from torch_shim.leases import request_context
from torch_shim.leases.leasing import ProcessLeases
from torch_shim.leases.managers import Nodes
from torch_shim.raised_failures import error_of
from torch_shim.weights import ModelImage
from torch_shim.wire.current_call import seconds_left
from torch_shim.wire.manager_session import ManagerSession
from torch_shim.wire.protocol import FailureKind, FrameKind

pytestmark = [pytest.mark.timeout(180, func_only=True), pytest.mark.usefixtures("patient_streams")]

PATIENT = LeaseTimes(pass_on_s=120.0, claim_s=120.0)  # nobody claims the lease that is held


def offered(session: ManagerSession, image: SealedWeights) -> None:
    session.control.ask(FrameKind.UPLOAD, image.offer, (), [image.descriptor])


def arrived(it: Scheduler) -> list[RequestArrived]:
    """Every request that has come, also one that is over by now."""
    return [event for event in it.events if isinstance(event, RequestArrived)]


def asks_for_long(it: Scheduler) -> bool:
    """Whether a request has come that will not expire soon."""
    soon_s = asyncio.get_running_loop().time() + 20.0
    return any((event.request.deadline_s or 0.0) > soon_s for event in arrived(it))


def test_time_is_left_inside_a_call_that_has_a_limit() -> None:
    assert seconds_left() is None
    limits = iter((60.0, None, 5.0))
    with request_context.given(None, None, left_s=lambda: next(limits)):
        assert seconds_left() == 60.0
        with request_context.given(None, None):
            assert seconds_left() is None
        with request_context.given(None, None, left_s=lambda: 0.0):
            assert seconds_left() == 0.0
        assert seconds_left() is None, "the limit is asked for each time: it may have changed"
        inside = contextvars.copy_context()
        assert inside.run(seconds_left) == 5.0
    assert seconds_left() is None
    assert inside.run(seconds_left) is None, "work that outlives its call has no deadline"


async def test_request_ends_with_the_time_of_its_call(tmp_path: Path) -> None:
    def acquired(session: ManagerSession, left_s: float) -> object:
        with request_context.given(None, None, left_s=lambda: left_s):
            return session.acquire(image.digest, 1)

    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        _, image = await uploaded(node)
        held = await given(it, image)
        credential = node.manager.credentials.issue(FunctionIdentity("team", "function"))
        nodes = Nodes(str(node.manager.addresses[0]), credential)
        session = nodes.own
        await asyncio.to_thread(offered, session, image)

        with pytest.raises(RemoteFailure) as failure:
            await asyncio.to_thread(acquired, session, 0.2)
        assert failure.value.failure == FailureKind.EXPIRED
        assert isinstance(error_of(failure.value), GpuUnavailable)
        assert leases_of(it) == {held.lease}
        assert len(it.core.requests) == 1, "of the lease that is held"

        waiting = asyncio.ensure_future(asyncio.to_thread(acquired, session, 10.0))
        await asyncio.sleep(0)
        it.driver.release(held.lease)
        await waiting
        nodes.close()
        image.close()
    await it.stop()


async def test_thread_that_asks_on_for_another_one_has_waited_as_long_as_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of one process share a question, which has the time of the call that asks it."""
    # A busy machine may hold a thread up between two questions.
    monkeypatch.setattr("gpu_manager.sessions.acquiring._AT_ONCE_S", 60.0)
    # What the manager asks for the session, before it becomes a time of the scheduler's clock.
    asked: list[Request] = []
    ask = Attachment.acquire

    def noted(it: Attachment, request: Request) -> Awaitable[Placement]:
        asked.append(request)
        return ask(it, request)

    monkeypatch.setattr(Attachment, "acquire", noted)

    def called(leases: ProcessLeases, left_s: float) -> int:
        def bring(_: ManagerSession) -> ModelImage:
            return ModelImage(image.digest, {})

        until_s = time.monotonic() + left_s
        left = request_context.given(
            None, None, left_s=lambda: max(0.0, until_s - time.monotonic())
        )
        with left:
            return leases.lease_for(1, bring).lease.number

    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        _, image = await uploaded(node)
        held = await given(it, image)
        credential = node.manager.credentials.issue(FunctionIdentity("team", "function"))
        nodes = Nodes(str(node.manager.addresses[0]), credential)
        await asyncio.to_thread(offered, nodes.own, image)
        leases = ProcessLeases(nodes)

        hurried = asyncio.ensure_future(asyncio.to_thread(called, leases, 1.0))
        await eventually(lambda: bool(asked), "the hurried call has asked")
        patient = asyncio.ensure_future(asyncio.to_thread(called, leases, 60.0))
        short = asyncio.ensure_future(asyncio.to_thread(called, leases, 0.1))
        for each in (short, hurried):
            with pytest.raises(RemoteFailure) as failure:
                await each
            assert failure.value.failure == FailureKind.EXPIRED
        await eventually(lambda: asks_for_long(it), "the patient call has asked on")
        it.driver.release(held.lease)
        await patient
        assert len({request.id for request in asked}) >= 2
        assert len({request.arrived_s for request in asked}) == 1
        nodes.close()
        image.close()
    await it.stop()
