"""What GPU functions, and the gateway, are told of the cluster's GPUs."""

from gateway_ext.api import FunctionId
from gateway_ext.ports import Capacity
from gpufaas.injection import ShimInjection
from gpufaas.remote import Remote
from scheduler.service.access import Role, token
from tests.builders import gpu
from tests.fake_node import fake_node
from tests.scheduler_process import free_port
from tests.service_world import SECRET, in_real_time, leading

FUNCTION = FunctionId("openfaas-fn", "f")


def injection(url: str) -> ShimInjection:
    return ShimInjection("unix:/nowhere", SECRET, Remote((url,), token(SECRET, Role.CALLER)))


@in_real_time
async def test_the_largest_gpu_is_known_once_the_scheduler_was_asked() -> None:
    small, large = gpu("g0", node="n0", memory_mb=8192), gpu("g1", node="n0", memory_mb=16384)
    async with leading(fake_node("n0", small, large)) as world:
        found = injection(world.url)
        capacity: Capacity = found
        assert capacity.largest_gpu_bytes() is None
        assert "GPUFAAS_GPU_MEMORY" not in found.environment(FUNCTION)
        await found.look()
    assert capacity.largest_gpu_bytes() == 16 << 30
    assert found.environment(FUNCTION)["GPUFAAS_GPU_MEMORY"] == str(16 << 30)
    await found.look()
    assert capacity.largest_gpu_bytes() == 16 << 30, "what was known stays"


@in_real_time
async def test_nothing_is_known_when_no_scheduler_answers() -> None:
    found = injection(f"http://127.0.0.1:{free_port()}")
    await found.look()
    assert found.largest_gpu_bytes() is None
