"""The card that the tests of this folder use, and what processes need that give up their files."""

import os

import pytest

from cache_manager.model.ids import NodeId
from gpu_manager.errors import BadSetting, NoDriver
from gpu_manager.node.host_gpus import choose_devices
from tests.kit.places import ROOT


@pytest.fixture(scope="module")
def uuid() -> str:
    """The driver's name for the first card."""
    try:
        devices = choose_devices("cuda:0", NodeId("here"))
    except (NoDriver, BadSetting) as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")
    found = devices[0].worker_device.removeprefix("cuda:")
    devices[0].close()
    return found


@pytest.fixture(scope="session")
def own_root() -> dict[str, str]:
    """The environment of a process that moves to a root of its own, as the fork server does."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}  # it finds our packages by their path alone
