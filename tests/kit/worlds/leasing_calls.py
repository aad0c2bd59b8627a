"""The leasing of one function's calls, over fake leases that stand."""

import asyncio
from dataclasses import dataclass

from cache_manager.model.ids import ModelId
from gateway_ext.calls.function_table import Function
from gateway_ext.calls.gpu_leasing import CallLease, GpuLeasing
from gateway_ext.metrics import GatewayMeters
from gateway_ext.openfaas.function_options import FunctionOptions, HandlerBatches
from gateway_ext.tracing.journey import Journey
from scheduler.api import LeaseId, LeaseUse, StandingTerms
from tests.kit.worlds.calling import FakeLeases, a_deployment

TERMS = StandingTerms(60.0, 100)
A, B = "http://a", "http://b"


@dataclass
class Leasing:
    """The leasing of one function's calls, over fake leases that stand."""

    leases: FakeLeases
    leasing: GpuLeasing
    function: Function

    async def acquire(self, call_id: str, instance: str = A) -> CallLease:
        journey = Journey(call_id, "echo", "POST", 32 * "a", 1, gpu=True, sampled=False)
        journey.attempt()
        deadline_s = asyncio.get_running_loop().time() + 9
        lease = await self.leasing.acquire(
            self.function, instance, journey, deadline_s, own_id=True
        )
        assert lease is not None
        assert journey.attempts[-1].request == lease.request
        return lease

    def done(self, lease: CallLease, *, clean: bool = True) -> None:
        self.leasing.release(lease, clean=clean)

    @property
    def asked(self) -> list[str]:
        return [request.id for request in self.leases.asked]

    def uses(self) -> list[LeaseUse]:
        return [use for report in self.leases.reports for use in report.uses]

    def ends(self) -> list[str]:
        return [end.request for report in self.leases.reports for end in report.ends]

    def recall(self, lease: int) -> None:
        assert self.leases.keeper is not None
        self.leases.keeper.recalled(LeaseId(lease))


def leasing_of_calls(together: int = 0) -> Leasing:
    """With a handler that is given so many calls together, or one."""
    leases = FakeLeases()
    leases.terms = TERMS
    options = FunctionOptions(gpu=True, batches=HandlerBatches(together))
    function = Function(a_deployment(), options)
    function.learned.models = (ModelId("openfaas-fn/bert"),)
    return Leasing(leases, GpuLeasing(leases, GatewayMeters()), function)
