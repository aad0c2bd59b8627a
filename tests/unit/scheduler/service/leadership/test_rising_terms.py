"""Leases of a leader whose term rises while it leads, as after its datastore lost all data."""

import asyncio
from pathlib import Path

from gpufaas.commands.studies.replay import replay
from scheduler.model.actions import Dispatch
from scheduler.model.events import LeaseIdsRaised, RequestArrived
from scheduler.model.values import LeaseId
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.leadership.term import Office, first_lease
from scheduler.service.metrics.counters import SchedulerCounters
from scheduler.service.settings import Settings
from testbed.nodes.attaching import attach_in_process
from testbed.nodes.fake_node import fake_node
from tests.kit.cores.builders import a_core, gpu, request


async def test_leases_of_a_risen_term_are_above_those_of_the_terms_between(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorder = RunRecorder(path)
    loop = asyncio.get_running_loop()
    office = Office(Settings(), 1, loop, SchedulerCounters(), recorder=recorder)
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
