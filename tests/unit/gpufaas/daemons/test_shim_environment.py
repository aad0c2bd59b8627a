"""Variables for GPU functions, and the capacity that the gateway sees."""

import pytest

from gateway_ext.api import FunctionId
from gpufaas.commands.gateway import ShimEnvironment
from gpufaas.remote.scheduler_api import SchedulerApi
from gpufaas.stack.held_ports import HeldPort
from scheduler.service.access import ApiRole, token
from tests.kit.cores.builders import gpu
from tests.kit.nodes.fake_node import fake_node
from tests.kit.worlds.service_world import SECRET, leading

pytestmark = pytest.mark.timeout(180, func_only=True)

FUNCTION = FunctionId("openfaas-fn", "f")


def shim_environment(url: str) -> ShimEnvironment:
    return ShimEnvironment(
        "unix:/nowhere", SECRET, SchedulerApi((url,), token(SECRET, ApiRole.CALLER))
    )


async def test_the_largest_gpu_is_known_once_the_scheduler_was_asked() -> None:
    small, large = gpu("g0", node="n0", memory_mb=8192), gpu("g1", node="n0", memory_mb=16384)
    async with leading(fake_node("n0", small, large)) as world:
        found = shim_environment(world.url)
        assert found.largest_gpu_bytes() is None
        assert "GPUFAAS_GPU_MEMORY" not in found.environment(FUNCTION)
        await found.refresh()
    assert found.largest_gpu_bytes() == 16 << 30
    assert found.environment(FUNCTION)["GPUFAAS_GPU_MEMORY"] == str(16 << 30)
    await found.refresh()
    assert found.largest_gpu_bytes() == 16 << 30, "what was known stays"


def test_gpu_function_sees_no_gpu_of_the_machine() -> None:
    found = shim_environment(f"http://127.0.0.1:{HeldPort().keep()}").environment(FUNCTION)
    assert found["CUDA_VISIBLE_DEVICES"] == ""


async def test_nothing_is_known_when_no_scheduler_answers() -> None:
    found = shim_environment(f"http://127.0.0.1:{HeldPort().keep()}")
    await found.refresh()
    assert found.largest_gpu_bytes() is None
