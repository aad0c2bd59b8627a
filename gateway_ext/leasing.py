"""GPUs for calls: asks the scheduler for a lease before a call, and gives it back after."""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from typing import NamedTuple, Protocol

from gateway_ext import refusals
from gateway_ext.meters import Meters
from gateway_ext.table import Function
from gateway_ext.tracing.journey import LEASE, Journey
from scheduler.api import (
    Cancelled,
    Failed,
    LeaseId,
    Refused,
    Request,
    RequestId,
    SchedulerError,
    TraceContext,
)
from scheduler.client import Granted

log = logging.getLogger(__name__)

_CALL_ID_LETTERS = 64
_FAREWELL_S = 5.0


class Leases(Protocol):
    """Where leases come from: `scheduler.client.SchedulerClient`."""

    async def acquire(self, request: Request, trace: TraceContext | None = None) -> Granted:
        """Wait for a lease, for this trace; cancelling the task cancels the request."""
        ...

    async def release(self, lease: LeaseId) -> None:
        """The holder needs the GPU no more."""
        ...

    async def cancel(self, request: RequestId) -> None:
        """The request ends, wherever it is."""
        ...


class Lease(NamedTuple):
    """A lease, and the header lines that tell a function of it."""

    id: LeaseId
    lines: tuple[bytes, ...]


class Leasing:
    """Leases for the calls of GPU functions."""

    def __init__(self, leases: Leases, meters: Meters) -> None:
        self._leases = leases
        self._meters = meters
        self._tasks: set[asyncio.Task[None]] = set()

    async def acquire(
        self, function: Function, journey: Journey, deadline_s: float, *, own_id: bool
    ) -> Lease | None:
        """A lease for the models that the call is expected to use, waited for until `deadline_s`.

        None where none is expected, or where they are not known any more: the call then asks for
        its GPU by itself. NoGpu where the call cannot be given one. `own_id` says that no other
        call can have this id.
        """
        learned = function.learned
        if not learned.models:
            return None
        call_id, attempt = journey.call_id, journey.attempts[-1]
        request = _request(function, call_id, deadline_s, own_id=own_id)
        attempt.request = request.id
        asked_s = time.monotonic()
        try:
            trace = journey.context(LEASE, attempt.number)
            granted = await self._leases.acquire(request, trace)
        except asyncio.CancelledError:
            # The answer may have been on its way, and nobody else would give this lease back.
            self._later(self._cancel(request.id))
            self._meters.lease("cancelled", time.monotonic() - asked_s)
            raise
        except (Refused, Failed, Cancelled) as error:
            log.info("call %s: %s goes on without a lease: %s", call_id, function.id, error)
            learned.forget()
            self._meters.lease("refused", time.monotonic() - asked_s)
            attempt.leased_s = time.monotonic()
            return None
        except SchedulerError as error:
            self._meters.lease(type(error).__name__, time.monotonic() - asked_s)
            raise refusals.no_gpu(error) from error
        hit = "hit" if granted.placement.hit else "miss"
        attempt.leased_s, attempt.placement = time.monotonic(), granted.placement
        self._meters.lease(hit, attempt.leased_s - asked_s)
        return Lease(granted.placement.lease, _lines(granted))

    def release(self, lease: Lease) -> None:
        """The call is over; the scheduler is told in the background."""
        self._later(self._release(lease.id))

    async def close(self) -> None:
        """Wait a moment for what the scheduler is still to be told."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_FAREWELL_S)
            for task in late:
                task.cancel()
            if late:
                log.warning("%d leases could not be given back: they end by themselves", len(late))
                await asyncio.wait(late)

    async def _release(self, lease: LeaseId) -> None:
        try:
            await self._leases.release(lease)
        except SchedulerError as error:  # the GPU manager ends a lease that is not used
            log.warning("lease %s was not given back: %s", lease, error)

    async def _cancel(self, request: RequestId) -> None:
        try:
            await self._leases.cancel(request)
        except SchedulerError as error:
            log.info("request %s was not cancelled: %s", request, error)

    def _later(self, saying: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(saying)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _request(function: Function, call_id: str, deadline_s: float, *, own_id: bool) -> Request:
    wished = function.wishes
    return Request(
        id=_request_id(call_id, own_id=own_id),
        function=function.id.for_scheduler,
        models=function.learned.models,
        batch=wished.batch,
        deadline_s=deadline_s,
        priority=wished.priority,
        slo_s=wished.slo_s,
    )


def _request_id(call_id: str, *, own_id: bool) -> RequestId:
    """One of its own for each lease: two requests of one id would be taken for the same one."""
    if own_id:
        return RequestId(call_id)
    plain = "".join(letter for letter in call_id[:_CALL_ID_LETTERS] if letter.isprintable())
    return RequestId(f"{plain}~{secrets.token_hex(6)}")


def _lines(granted: Granted) -> tuple[bytes, ...]:
    addresses = ",".join(granted.addresses).encode("latin-1")
    token = granted.token.encode("latin-1")
    return (b"x-gpu-address: ", addresses, b"\r\nx-gpu-lease: ", token, b"\r\n")
