"""Requested GPU memory is compared with the memory of the GPUs."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.worlds.gateway_world import gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)


@dataclass
class Largest:
    """What is known of the GPUs."""

    bytes: int | None

    def largest_gpu_bytes(self) -> int | None:
        return self.bytes


async def test_a_function_that_fits_no_gpu_is_refused_once_one_is_known(tmp_path: Path) -> None:
    gpus = Largest(None)
    async with gateway_world(tmp_path, largest_gpu_bytes=gpus.largest_gpu_bytes) as world:
        options = {"annotations": {"com.gpufaas.memory": "80GiB"}}
        assert (await world.deploy("before", **options)).status == 202
        gpus.bytes = 16 << 30
        why = "com.gpufaas.memory: 80GiB: the largest GPU has 16 GiB"
        refused = await world.deploy("after", **options)
        assert (refused.status, refused.body.strip()) == (400, why)
        body = {"service": "before", "image": "i"} | options
        assert (await world.ask("PUT", "/system/functions", body)).status == 400
        options["annotations"]["com.gpufaas.memory"] = "16GiB"
        assert (await world.deploy("after", **options)).status == 202
