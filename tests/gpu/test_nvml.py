"""What NVML says of a real card, beside what a process does on it."""

from collections.abc import Iterator

import pynvml  # type: ignore[import-untyped]  # NVIDIA gives it no types
import pytest
import torch

from cache_manager.model.ids import NodeId
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.errors import BadSetting, NoDriver
from gpu_manager.node.host_gpus import choose_devices

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture(scope="module")
def card() -> Iterator[GpuDevice]:
    try:
        devices = choose_devices("cuda", NodeId("here"))
    except (NoDriver, BadSetting) as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")
    yield devices[0]
    devices[0].close()


def test_card_says_its_name_memory_and_use(card: GpuDevice) -> None:
    assert card.kind == "cuda"
    assert card.gpu_type
    assert 0 < card.memory_bytes == card.device_bytes
    used = card.used_bytes()
    assert used is not None
    assert 0 <= used <= card.device_bytes
    utilisation = card.utilisation()
    assert utilisation is None or 0 <= utilisation <= 1


def test_card_is_the_one_that_torch_sees_under_its_environment(card: GpuDevice) -> None:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    assert card.name in names


def test_use_of_the_card_grows_by_what_a_process_takes(card: GpuDevice) -> None:
    before = card.used_bytes()
    taken = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    after = card.used_bytes()
    assert before is not None
    assert after is not None
    assert after - before >= taken.numel()


def test_watch_of_the_card_ends_when_it_is_closed(card: GpuDevice) -> None:
    assert not any(event.fatal for event in card.health())
    again = choose_devices("cuda", NodeId("here"))
    for device in again:
        device.close()
    assert pynvml.nvmlDeviceGetCount() >= 1
