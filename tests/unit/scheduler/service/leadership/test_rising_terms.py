"""Leases of a leader whose term rises while it leads, as after its datastore lost all data."""

from pathlib import Path

from cache_manager.model.ids import ModelId
from gpufaas.commands.replay import replay
from scheduler.model.actions import Dispatch
from scheduler.model.events import LeaseIdsRaised, LeaseReleased, LiveLease, RequestArrived
from scheduler.model.values import LeaseId, RequestId, SlotId
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.leadership.term import Office, first_lease
from scheduler.service.metrics.counting import SchedulerCounters
from scheduler.settings import Settings
from tests.kit.cores.builders import a_core, gpu, request
from tests.kit.nodes.attaching import attach_in_process
from tests.kit.nodes.fake_node import fake_node


async def test_leases_of_a_risen_term_are_above_those_of_the_terms_between(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorder = RunRecorder(path)
    office = Office(Settings(), 1, SchedulerCounters(), recorder=recorder)
    attach_in_process(office.driver, fake_node("n0", *(gpu(f"g{n}", node="n0") for n in range(2))))
    before = await office.driver.acquire(request("r0"))
    assert before.lease == first_lease(1)

    office.rise(4)

    assert office.term == 4
    assert (await office.driver.acquire(request("r1"))).lease == first_lease(4)
    office.close()
    recorder.close()
    assert replay(path).differing_lines == []


def test_lease_ids_never_fall() -> None:
    core = a_core(gpus=(gpu("g0"), gpu("g1")))
    core.handle(LeaseIdsRaised(LeaseId(100)), 0.0)
    core.handle(LeaseIdsRaised(LeaseId(50)), 0.0)
    actions = core.handle(RequestArrived(request("r0")), 0.0)
    assert [each.lease for each in actions if isinstance(each, Dispatch)] == [100]


def test_release_of_a_lease_of_another_term_is_remembered_when_the_term_rises() -> None:
    core = a_core(gpus=())
    lease = LeaseId(first_lease(3))
    core.handle(LeaseIdsRaised(LeaseId(first_lease(4))), 0.0)
    core.handle(LeaseReleased(lease), 0.0)
    live = LiveLease(lease, SlotId("g0"), (ModelId("bert"),), (RequestId("r0"),))
    assert core.lifecycle.handover.left(live) is None
