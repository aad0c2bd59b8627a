"""A call that has used a GPU waits for a quota that is used up; one that begins is refused."""

import asyncio
from pathlib import Path

import pytest

from gpu_manager.api import FunctionIdentity
from scheduler.model.events import LeaseComputed, TermsSet
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import LeaseId
from tests.kit.waiting import eventually
from tests.kit.worlds.callers_leases import uploaded
from tests.kit.worlds.cluster_in_process import a_scheduler, leases_of
from tests.kit.worlds.joined_manager import joined
from torch_shim.errors import QuotaUsedUp
from torch_shim.leases import request_context
from torch_shim.leases.leasing import ProcessLeases
from torch_shim.leases.managers import Nodes
from torch_shim.weights import ModelImage
from torch_shim.wire.manager_session import ManagerSession
from torch_shim.wire.protocol import FrameKind

pytestmark = [pytest.mark.timeout(180, func_only=True), pytest.mark.usefixtures("patient_streams")]


async def test_call_that_goes_on_waits_for_the_quota_that_refuses_a_new_one(tmp_path: Path) -> None:
    def bring(_: ManagerSession) -> ModelImage:
        return ModelImage(image.digest, {})

    def offer() -> None:
        nodes.own.control.ask(FrameKind.UPLOAD, image.offer, (), [image.descriptor])

    def called(*, used: bool) -> LeaseId:
        with request_context.given(None, None, left_s=lambda: 10.0):
            if used:
                request_context.note_answer()
            return LeaseId(ProcessLeases(nodes).lease_for(1, bring).lease.number)

    it = await a_scheduler()
    async with joined(tmp_path, it.url) as node:
        _, image = await uploaded(node)
        credential = node.manager.credentials.issue(FunctionIdentity("team", "function"))
        nodes = Nodes(str(node.manager.addresses[0]), credential)
        await asyncio.to_thread(offer)
        it.driver.report(TermsSet("team", OwnerTerms(gpu_s=0.1, window_s=600.0)))
        first = await asyncio.to_thread(called, used=False)
        await asyncio.sleep(0.2)
        it.driver.report(LeaseComputed(first, 1.0))  # no more than has passed counts
        it.driver.release(first)
        await eventually(lambda: not leases_of(it))

        with pytest.raises(QuotaUsedUp):
            await asyncio.to_thread(called, used=False)
        waiting = asyncio.ensure_future(asyncio.to_thread(called, used=True))
        await eventually(lambda: it.core.cluster.held == 1)
        it.driver.report(TermsSet("team", OwnerTerms(gpu_s=100.0, window_s=600.0)))
        assert await waiting > first
        nodes.close()
        image.close()
    await it.stop()
