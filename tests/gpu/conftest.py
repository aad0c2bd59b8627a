"""The card that the tests of this folder use."""

import pytest

from cache_manager.model.ids import NodeId
from gpu_manager.devices.device_choice import choose
from gpu_manager.errors import NoDriver, NoSuchDevice


@pytest.fixture(scope="module")
def uuid() -> str:
    """The driver's name for the first card."""
    try:
        devices = choose("cuda:0", NodeId("here"))
    except (NoDriver, NoSuchDevice) as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")
    found = devices[0].worker_device.removeprefix("cuda:")
    devices[0].close()
    return found
