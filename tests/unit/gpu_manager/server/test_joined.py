"""GPU managers of a cluster: functions, their callers' leases, and the end of a node."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cache_manager.model.ids import NodeId
from gpu_manager.node.leases import LeaseTimes
from gpu_manager.sessions import acquiring
from scheduler.model.events import ModelDemoted, SlotFreed
from scheduler.model.values import LeaseId, SlotId
from tests.kit.nodes.manager_client import ManagerClient, ManagerRefused, weights
from tests.kit.virtual_time import outcome
from tests.kit.waiting import PATIENCE_S, eventually
from tests.kit.worlds.callers_leases import given, token, uploaded
from tests.kit.worlds.cluster_in_process import Wire, a_scheduler, leases_of
from tests.kit.worlds.joined_manager import GRACE_S, PATIENT, joined, model_of
from torch_shim.wire.protocol import FrameKind

pytestmark = [pytest.mark.timeout(180, func_only=True), pytest.mark.usefixtures("patient_streams")]


# -- functions that ask by themselves -------------------------------------------------------------


async def test_function_is_served_when_its_manager_belongs_to_a_cluster(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url) as node:
        client, image = await uploaded(node)
        answer, (channel,) = await client.acquire(image.digest)
        assert answer["gpu"] == "n0/cpu:0"
        assert leases_of(it) == {answer["lease"]}
        await client.tell(FrameKind.RELEASE, {"lease": answer["lease"]})
        await eventually(lambda: not leases_of(it))
        assert it.streams.addresses[NodeId("n0")] == (str(node.manager.addresses[0]),)
        channel.close()
        image.close()
    await it.stop()


async def test_administrator_sees_what_the_scheduler_pinned_when_it_is_elsewhere(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url) as node:
        client, image = await uploaded(node)
        _, (channel,) = await client.acquire(image.digest)
        admin = await ManagerClient.open(str(node.manager.addresses[0]))
        await admin.hello("", role="admin")
        pin = {"do": "pin", "model": model_of(image), "gpu": None}
        await admin.ask(FrameKind.ADMIN, pin)
        rows, _ = await admin.ask(FrameKind.ADMIN, {"do": "models"})
        assert [(row["model"], row["pinned"]) for row in rows["models"]] == [
            (model_of(image), True)
        ]
        status, _ = await admin.ask(FrameKind.ADMIN, {"do": "status"})
        assert (status["policy"], status["leases"]) == ("lalbo3", 1)
        admin.close()
        channel.close()
        image.close()
    await it.stop()


# -- leases that a gateway asked for --------------------------------------------------------------


async def test_unused_lease_ends_when_its_token_is_presented_for_other_models(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url) as node:
        client, image = await uploaded(node)
        other = weights(os.urandom(1000))
        await client.upload(other)
        placement = await given(it, image)

        # The only GPU would never come free for it, if its own request kept it.
        with pytest.raises(ManagerRefused, match="for other models"):
            await client.acquire(other.digest, token=token(placement))
        answer, (channel,) = await client.acquire(other.digest)

        assert answer["lease"] != placement.lease
        assert leases_of(it) == {answer["lease"]}
        channel.close()
        image.close()
        other.close()
    await it.stop()


async def test_function_uses_its_callers_lease_when_it_presents_the_token(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url) as node:
        client, image = await uploaded(node)
        placement = await given(it, image)

        answer, (channel,) = await client.acquire(image.digest, token=token(placement))
        again, (another,) = await client.acquire(image.digest, token=token(placement))

        assert answer["lease"] == again["lease"] == placement.lease
        assert leases_of(it) == {placement.lease}
        it.driver.release(placement.lease)
        await eventually(lambda: not leases_of(it))
        assert it.driver.status().counts.finished == {"completed": 1}
        channel.close()
        another.close()
        image.close()
    await it.stop()


@pytest.mark.parametrize("presented", ["a forged one", "of another function", "of another cluster"])
async def test_function_is_refused_when_the_token_is_not_its_own(
    tmp_path: Path, presented: str
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url) as node:
        client, image = await uploaded(node)
        placement = await given(it, image)
        tokens = {
            "a forged one": token(placement)[:-3] + "abc",
            "of another function": token(placement, function="team/other"),
            "of another cluster": token(placement) + "x",
        }
        with pytest.raises(ManagerRefused) as refused:
            await client.acquire(image.digest, token=tokens[presented])
        assert refused.value.failure == "not allowed"
        assert leases_of(it) == {placement.lease}
        image.close()
    await it.stop()


async def test_second_process_is_refused_when_both_present_one_token_at_once(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url) as node:
        one, image = await uploaded(node)
        other = await node.client()
        placement = await given(it, image)
        shown = token(placement)

        found = await asyncio.gather(
            one.acquire(image.digest, token=shown),
            other.acquire(image.digest, token=shown),
            return_exceptions=True,
        )

        refused = [each for each in found if isinstance(each, ManagerRefused)]
        granted = [each for each in found if isinstance(each, tuple)]
        assert [each.failure for each in refused] == ["lease not in force"]
        ((answer, (channel,)),) = granted
        assert answer["lease"] == placement.lease
        assert leases_of(it) == {placement.lease}
        channel.close()
        image.close()
    await it.stop()


async def test_function_is_refused_when_the_token_came_late(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url) as node:
        client, image = await uploaded(node)
        placement = await given(it, image)
        it.driver.release(placement.lease)
        await eventually(lambda: not leases_of(it))

        for late in (token(placement), token(placement, in_s=-1.0)):
            with pytest.raises(ManagerRefused) as refused:
                await client.acquire(image.digest, token=late)
            assert refused.value.failure == "lease not in force"
        image.close()
    await it.stop()


async def test_lease_is_waited_for_when_its_token_was_faster_than_its_grant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquiring, "_GRANT_DELAY_S", PATIENCE_S)
    it = await a_scheduler()
    async with Wire.to(it.url) as wire, joined(tmp_path, wire.url) as node:
        client, image = await uploaded(node)
        await eventually(lambda: it.driver.status().gpus)
        wire.freeze()
        placement = await given(it, image)
        asking = asyncio.ensure_future(client.acquire(image.digest, token=token(placement)))
        await asyncio.sleep(0.1)
        assert not asking.done()

        wire.thaw()

        answer, (channel,) = await asking
        assert answer["lease"] == placement.lease
        assert leases_of(it) == {placement.lease}
        channel.close()
        image.close()
    await it.stop()


async def test_lease_ends_when_nobody_comes_for_it(tmp_path: Path) -> None:
    it = await a_scheduler()
    times = LeaseTimes(unclaimed_s=0.2)
    async with joined(tmp_path, it.url, leases=times) as node:
        _, image = await uploaded(node)
        await given(it, image)  # and the gateway dies
        assert leases_of(it)
        await eventually(lambda: not leases_of(it))
        image.close()
    await it.stop()


async def test_lease_that_nobody_comes_for_passes_on_to_a_session_that_waits(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=LeaseTimes(claim_s=0.2)) as node:
        client, image = await uploaded(node)
        placement = await given(it, image)  # and its function computes for long
        answer, (channel,) = await client.acquire(image.digest)
        assert leases_of(it) == {answer["lease"]} != {placement.lease}
        late = await node.client(session="late")
        with pytest.raises(ManagerRefused):
            await late.acquire(image.digest, token=token(placement))
        asking = asyncio.ensure_future(late.acquire(image.digest))
        await client.tell(FrameKind.RELEASE, {"lease": answer["lease"]})
        another, (its,) = await asking  # the one that comes late gets a lease of its own
        assert leases_of(it) == {another["lease"]}
        channel.close()
        its.close()
        image.close()
    await it.stop()


# -- breaks, restarts, the end ---------------------------------------------------------------------


async def test_calls_go_on_when_the_scheduler_is_away_and_another_one_takes_over(
    tmp_path: Path,
) -> None:
    it = await a_scheduler(term=1)
    lasting = replace(PATIENT, quantum_s=60.0, quiet_s=60.0)
    async with joined(tmp_path, it.url, leases=lasting) as node:
        client, image = await uploaded(node)
        answer, (channel,) = await client.acquire(image.digest)
        hosted = node.runtime.of(model_of(image))
        await it.stop()

        await hosted.call(answer["lease"])

        asking = asyncio.ensure_future((await node.client(session="another")).acquire(image.digest))
        new = await a_scheduler(term=2, port=int(it.url.rpartition(":")[2]))
        await eventually(lambda: leases_of(new) == {answer["lease"]})
        await client.tell(FrameKind.RELEASE, {"lease": answer["lease"]})
        second, (other,) = await asking
        assert second["lease"] >> 32 == 2
        assert second["hit"]
        assert node.runtime.of(model_of(image)) is hosted
        assert not any(isinstance(event, ModelDemoted) and event.gpu for event in new.events)
        channel.close()
        other.close()
        image.close()
        await new.stop()


async def test_node_is_gone_at_once_when_it_stops(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, drain_s=60.0) as node:
        client, image = await uploaded(node)
        answer, (channel,) = await client.acquire(image.digest)
        call = asyncio.ensure_future(
            node.runtime.of(model_of(image)).call(answer["lease"], run_s=0.2)
        )
        await asyncio.sleep(0.01)
    assert call.done()
    assert call.exception() is None
    # It says that it leaves: a node that is silent stays for the grace.
    await eventually(lambda: it.nodes == {}, within_s=GRACE_S / 2)
    assert it.driver.status().gpus == ()
    assert SlotFreed(SlotId("n0/cpu:0"), LeaseId(answer["lease"])) in it.events
    assert it.driver.status().counts.finished == {"completed": 1}
    assert it.driver.status().counts.refusals == 0
    channel.close()
    image.close()
    await it.stop()


async def test_waiting_request_goes_to_another_node_when_its_node_stops(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, name="n1", leases=PATIENT) as other:
        _, image = await uploaded(other)
        await eventually(lambda: it.driver.status().gpus)
        async with joined(tmp_path, it.url, leases=PATIENT) as node:
            client = await node.client()
            await client.upload(image)
            held = [await given(it, image, "g0"), await given(it, image, "g1")]
            assert {placement.node for placement in held} <= {"n0", "n1"}
            waiting = given(it, image, "g2")
            await eventually(
                lambda: it.driver.status().waiting + it.driver.status().waiting_locally
            )
        far = next(placement for placement in held if placement.node == "n1")
        it.driver.release(far.lease)
        assert (await waiting).node == "n1"
        image.close()
    await it.stop()


async def test_node_stops_soon_when_no_scheduler_was_ever_reached(tmp_path: Path) -> None:
    async with joined(tmp_path, "http://127.0.0.1:1") as node:
        client, image = await uploaded(node)
        asking = asyncio.ensure_future(outcome(client.acquire(image.digest)))
        await asyncio.sleep(0.05)
        assert not asking.done()
        image.close()
    assert isinstance(await asking, Exception)


async def test_lease_that_stands_serves_the_processes_of_its_function_in_turn(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url) as node:
        first, image = await uploaded(node)
        second = await node.client(session=32 * "b")
        await second.upload(image)
        placement = await given(it, image, caller="gateway")
        for client in (first, second, first):
            answer, channels = await client.acquire(image.digest, token=token(placement))
            assert answer["lease"] == placement.lease
            for channel in channels:
                channel.close()
        assert leases_of(it) == {placement.lease}
        image.close()
    await it.stop()


async def test_recalled_lease_ends_when_its_caller_does_not_give_it_back(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url) as node:
        client, image = await uploaded(node)
        placement = await given(it, image, caller="gateway")
        _, (channel,) = await client.acquire(image.digest, token=token(placement))
        other = await given(it, image, "gateway/2", caller="another gateway")
        assert leases_of(it) == {other.lease}
        channel.close()
        image.close()
    await it.stop()
