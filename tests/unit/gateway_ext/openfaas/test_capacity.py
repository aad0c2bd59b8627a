"""Wishes for GPU memory are held against what the GPUs have."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.worlds.gateway_world import gateway_world

pytestmark = pytest.mark.timeout(30, func_only=True)


@dataclass
class Largest:
    """What is known of the GPUs."""

    bytes: int | None

    def largest_gpu_bytes(self) -> int | None:
        return self.bytes


async def test_a_function_that_fits_no_gpu_is_refused_once_one_is_known(tmp_path: Path) -> None:
    gpus = Largest(None)
    async with gateway_world(tmp_path, capacity=gpus) as world:
        wish = {"annotations": {"com.gpufaas.memory": "80GiB"}}
        assert (await world.deploy("before", **wish)).status == 202
        gpus.bytes = 16 << 30
        why = "com.gpufaas.memory: 80GiB: the largest GPU has 16 GiB"
        refused = await world.deploy("after", **wish)
        assert (refused.status, refused.body.strip()) == (400, why)
        body = {"service": "before", "image": "i"} | wish
        assert (await world.ask("PUT", "/system/functions", body)).status == 400
        wish["annotations"]["com.gpufaas.memory"] = "16GiB"
        assert (await world.deploy("after", **wish)).status == 202
