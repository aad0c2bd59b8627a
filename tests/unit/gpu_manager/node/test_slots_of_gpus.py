"""GPUs announced as slots: emulated ones and whole NVIDIA ones, but not MIG instances."""

import os
from typing import Any

import pytest

from cache_manager.model.ids import GpuId, NodeId
from gpu_manager.cuda import nvidia_gpu
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.devices.paths import GpuPaths
from gpu_manager.emulated.gpu import EmulatedGpu
from gpu_manager.errors import BadSetting
from gpu_manager.node.host_gpus import host_gpu
from gpu_manager.node.leases import Lease
from gpu_manager.node.settings import NodeSettings
from gpu_manager.worker.orders import LeaseTerms
from scheduler.api import Configuration, GpuSpec, LeaseId, LiveLease, SlotId
from tests.kit.fakes.fake_nvml import GIB, FakeGpu, FakeNvml

NODE = NodeId("node")
EMULATED = EmulatedGpu(GpuId("node/cpu:0"), GIB)
PROCESSORS = len(os.sched_getaffinity(0))


def spec(device: GpuDevice = EMULATED, gpus: int = 1, **settings: Any) -> GpuSpec:
    """How a GPU is announced."""
    made = host_gpu(device, NODE, NodeSettings("node", (), **settings), GpuPaths(), gpus)
    made.close()
    return made.spec


def lease(slot: str, *more: str, configuration: Configuration | None = None) -> Lease:
    slots = tuple(map(SlotId, more))
    live = LiveLease(LeaseId(1), SlotId(slot), (), (), slots, configuration)
    return Lease(live, EMULATED.id)


def test_a_gpu_is_one_slot_of_its_name_without_the_setting() -> None:
    assert spec().slots == ()
    assert [slot.id for slot in spec().slot_specs()] == ["node/cpu:0"]
    assert spec().vcpus == 0
    assert [slot.leases for slot in spec(gpu_overlap=3).slot_specs()] == [3]


def test_a_gpu_has_as_many_slots_as_the_setting_says() -> None:
    found = spec(gpu_slots=7)
    assert [slot.id for slot in found.slots] == [f"node/cpu:0/{number}" for number in range(7)]
    assert {slot.leases for slot in found.slots} == {1}
    assert found.vcpus == PROCESSORS


def test_the_gpus_of_a_node_have_equal_parts_of_its_processors() -> None:
    assert spec(gpus=4, gpu_slots=7).vcpus == max(1, PROCESSORS // 4)
    assert spec(gpus=4, gpu_slots=7, gpu_vcpus=16).vcpus == 16
    assert spec(gpu_vcpus=16).vcpus == 16


@pytest.mark.parametrize("slots", [0, 65])
def test_a_number_of_slots_is_refused_when_it_makes_no_sense(slots: int) -> None:
    with pytest.raises(BadSetting):
        spec(gpu_slots=slots)


def test_several_leases_on_a_part_of_a_gpu_are_refused() -> None:
    with pytest.raises(BadSetting, match="one lease"):
        spec(gpu_slots=7, gpu_overlap=2)


def test_a_gpu_has_no_turns_when_its_leases_run_at_once() -> None:
    (slot,) = spec(gpu_concurrency=2).slot_specs()
    assert (slot.leases, slot.at_once) == (2, True)
    made = host_gpu(EMULATED, NODE, NodeSettings("node", (), gpu_concurrency=2), GpuPaths(), 1)
    assert made.turns is None
    made.close()


def test_leases_that_run_at_once_are_refused_beside_other_ways_to_share() -> None:
    for slots, overlap in ((2, 1), (1, 2)):
        with pytest.raises(BadSetting, match="concurrency"):
            spec(gpu_concurrency=2, gpu_slots=slots, gpu_overlap=overlap)


def test_a_whole_nvidia_gpu_is_divided_and_what_lacks_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (device,) = nvidia_gpu.find(NODE, FakeNvml(FakeGpu("GPU-a")))
    assert len(spec(device, gpu_slots=7).slots) == 7
    assert "MPS does not run here" in caplog.text


def test_a_mig_instance_stays_one_slot_of_its_name() -> None:
    parts = {0: FakeGpu("MIG-a", instance=1), 1: FakeGpu("MIG-b", instance=2)}
    sliced = FakeGpu("GPU-a", partitioned=True, slices=parts)
    found = nvidia_gpu.find(NODE, FakeNvml(sliced))
    assert len(found) == 2
    assert [spec(device, gpu_slots=7).slots for device in found] == [(), ()]


def test_a_lease_of_a_whole_gpu_has_no_slots() -> None:
    assert lease("node/cpu:0").terms(spec()) == LeaseTerms()
    assert LeaseTerms().share == 1.0
    terms = lease("node/cpu:0", configuration=Configuration(4, 2, 1)).terms(spec())
    assert terms == LeaseTerms((), 1, 4, 2)


def test_a_lease_has_the_share_of_its_slots() -> None:
    terms = lease("node/cpu:0/5", "node/cpu:0/1").terms(spec(gpu_slots=7))
    assert terms == LeaseTerms((1, 5), 7)
    assert terms.share == 2 / 7


def test_slots_that_there_are_not_count_for_nothing() -> None:
    terms = lease("node/cpu:0/5", "another/0").terms(spec(gpu_slots=7))
    assert terms.slots == (5,)
