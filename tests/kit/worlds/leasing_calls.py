"""The leasing of one function's calls, over fake leases that stand."""

from dataclasses import dataclass

from cache_manager.model.ids import ModelId
from gateway_ext.calls.function_table import Function, FunctionCall
from gateway_ext.calls.learned import GpuReport
from gateway_ext.calls.lease_pool import CallLease, LeasePool
from gateway_ext.calls.passed_headers import RequestHeaders
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
    pool: LeasePool
    function: Function
    turns: bytes = b""  # what each answer says of them
    used: bytes = b"bert"  # the models that each answer names

    async def acquire(self, call_id: str, instance: str = A) -> CallLease:
        call = gpu_call(self.function, call_id)
        lease = CallLease(self.pool, call)
        await lease.take(instance)
        assert call.journey.attempts[-1].request == lease.request
        return lease

    def done(self, lease: CallLease, *, clean: bool = True) -> None:
        """The call ends with an answer, or without `clean` it breaks off."""
        if clean:
            lease.call.learn(GpuReport(self.used, turns=self.turns))
        self.pool.release(lease, clean=clean, answered=clean)

    @property
    def asked(self) -> list[str]:
        return [request.id for request in self.leases.asked]

    def uses(self) -> list[LeaseUse]:
        return [use for report in self.leases.reports for use in report.uses]

    def ends(self) -> list[str]:
        return [end.request for report in self.leases.reports for end in report.ends]

    def recall(self, lease: int) -> None:
        self.leases.recalled(LeaseId(lease))


def gpu_call(function: Function, call_id: str) -> FunctionCall:
    """A call of this id, which no other call has, in its first attempt."""
    journey = Journey(call_id, "echo", "POST", 32 * "a", 1, gpu=True, sampled=False)
    journey.attempt()
    return FunctionCall(function, "POST", b"", b"", RequestHeaders(), journey, own_id=True)


def leasing_of_calls(together: int = 0) -> Leasing:
    """With a handler that is given so many calls together, or one."""
    leases = FakeLeases()
    leases.terms = TERMS
    options = FunctionOptions(gpu=True, batches=HandlerBatches(together))
    function = Function(a_deployment(), options)
    function.learned.models = (ModelId("openfaas-fn/bert"),)
    return Leasing(leases, LeasePool(leases, GatewayMeters()), function)
