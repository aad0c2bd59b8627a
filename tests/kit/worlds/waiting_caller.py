"""A caller of the scheduler whose tasks wait for their leases."""

import asyncio

from common.telemetry.traces import TraceContext
from scheduler.api import Request, RequestId, SchedulerError
from scheduler.client.lease_client import LeaseClient
from scheduler.wire.caller_stream import Cancel, Granted


class WaitingCaller(LeaseClient):
    """The gateways' client; `acquire` waits for the answer of one question."""

    async def acquire(self, request: Request, trace: TraceContext | None = None) -> Granted:
        """Cancelling the task cancels the request; an error is raised."""
        answer: asyncio.Future[Granted | SchedulerError] = (
            asyncio.get_running_loop().create_future()
        )

        def take(value: Granted | SchedulerError) -> None:
            if not answer.done():
                answer.set_result(value)
            elif isinstance(value, Granted):
                self._drop(value.placement.lease, request.id)

        question = self.ask(request, trace, take)
        try:
            result = await answer
        except asyncio.CancelledError:
            self._questions.pop(question, None)
            self.cancel(request.id)  # also if the lease was granted a moment ago
            if not answer.cancelled():
                take(answer.result())
            raise
        if isinstance(result, SchedulerError):
            raise result
        return result

    def cancel(self, request: RequestId) -> None:
        """End a request that may have been answered already."""
        self._say(Cancel(request))
