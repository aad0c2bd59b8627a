"""A lease on several slots, with a configuration: in explanations, the report and the feed."""

from dataclasses import asdict

import pytest

from cache_manager import eviction
from scheduler.composition import compose
from scheduler.model.events import GpuJoined, ModelRegistered, RequestArrived
from scheduler.model.values import RequestId
from scheduler.service.history.history import History
from scheduler.service.http.operator_routes import explained
from scheduler.service.page_feed import Glances
from scheduler.service.survey import gpus_of
from scheduler.wire.cluster_status import ConfigurationStatus
from tests.kit.cores.builders import gpu, model, request
from tests.kit.cores.core_world import World
from tests.kit.cores.wide_policy import WidePolicy


@pytest.mark.parametrize("vcpus", [8, 0])
def test_slots_and_configuration_of_a_lease_are_shown(vcpus: int) -> None:
    world = World(compose(WidePolicy(), eviction.make("lru")))
    history = History(10, world.core.leases, lambda *_freed: None, lambda _ended: None)
    for event in (
        ModelRegistered(model("bert")),
        GpuJoined(gpu("g0", slots=3, vcpus=vcpus)),
        RequestArrived(request("r0")),
    ):
        history(world.now, event, world.send(event), 0.0)
    # Without vCPUs the GPU's manager takes no configuration.
    given = ConfigurationStatus(1, 3, 3) if vcpus else None

    record = history.get(RequestId("r0"))
    assert record is not None
    (decision,) = explained(record, None, [], world.now).decisions
    assert (decision.slot, decision.more_slots) == ("g0.0", ("g0.1", "g0.2"))
    assert decision.configuration == given

    first, *others = gpus_of(world.core)[0].slots
    (lease,) = first.leases
    assert (lease.more_slots, lease.configuration) == (("g0.1", "g0.2"), given)
    assert [slot.leases for slot in others] == [(), ()]
    configuration = asdict(lease)["configuration"]
    assert configuration == ({"batch": 1, "vcpus": 3, "vgpus": 3} if vcpus else None)

    (glance,) = Glances(world.core, history, 0.0).gpus()["g0"]["leases"]
    shown = (glance["slots"], glance["batch"], glance["vcpus"])
    assert shown == (3, *((1, 3) if vcpus else (None, None)))
