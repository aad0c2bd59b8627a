"""GPU leases for calls: acquired from the scheduler before a call, given back after it."""

import asyncio
import logging
import secrets
import time
from typing import NamedTuple, Protocol

from common.telemetry.traces import TraceContext
from gateway_ext import error_statuses
from gateway_ext.calls.function_table import Function
from gateway_ext.metrics.call_counts import GatewayMeters
from gateway_ext.tracing.call_journey import LEASE, Journey
from scheduler.api import (
    EventRefused,
    LeaseId,
    QueueFull,
    Request,
    RequestFailed,
    RequestId,
    RequestWithdrawn,
    SchedulerError,
)
from scheduler.client.granted_lease import GrantedLease

log = logging.getLogger(__name__)

_CALL_ID_LETTERS = 64


class LeaseSource(Protocol):
    """Where leases come from: `scheduler.client.lease_client.LeaseClient`."""

    async def acquire(self, request: Request, trace: TraceContext | None = None) -> GrantedLease:
        """Wait for a lease, for this trace; cancelling the task cancels the request."""
        ...

    def release(self, lease: LeaseId) -> None:
        """Give the GPU back."""
        ...


class CallLease(NamedTuple):
    """A lease, and the header lines that pass it to a function."""

    id: LeaseId
    lines: tuple[bytes, ...]


class GpuLeasing:
    """Leases for the calls of GPU functions."""

    def __init__(self, leases: LeaseSource, meters: GatewayMeters) -> None:
        self._leases = leases
        self._meters = meters

    async def acquire(
        self, function: Function, journey: Journey, deadline_s: float, *, own_id: bool
    ) -> CallLease | None:
        """A lease for the models that the call is expected to use, waited for until `deadline_s`.

        None if no model is expected, or if the scheduler no longer knows the models: the function
        then asks for its GPU by itself. NoGpu if the scheduler refuses. `own_id`: no other call can
        have this id.
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
            self._meters.lease("cancelled", time.monotonic() - asked_s)
            raise
        except (EventRefused, RequestFailed, RequestWithdrawn) as error:
            log.info("call %s: %s continues without a lease: %s", call_id, function.id, error)
            learned.forget()
            self._meters.lease("refused", time.monotonic() - asked_s)
            attempt.leased_s = time.monotonic()
            return None
        except SchedulerError as error:
            if isinstance(error, QueueFull):
                function.waits.saw_full_gpus(error.wait_s, function.most_wait_s, time.monotonic())
            self._meters.lease(type(error).__name__, time.monotonic() - asked_s)
            raise error_statuses.no_gpu(error) from error
        hit = "hit" if granted.placement.hit else "miss"
        attempt.leased_s, attempt.placement = time.monotonic(), granted.placement
        self._meters.lease(hit, attempt.leased_s - asked_s)
        return CallLease(granted.placement.lease, _lines(granted))

    def release(self, lease: CallLease) -> None:
        """The call is over: give its lease back."""
        self._leases.release(lease.id)


def _request(function: Function, call_id: str, deadline_s: float, *, own_id: bool) -> Request:
    options = function.options
    return Request(
        id=_request_id(call_id, own_id=own_id),
        function=function.id.for_scheduler,
        models=function.learned.models,
        batch=options.batch,
        deadline_s=deadline_s,
        priority=options.priority,
        slo_s=options.slo_s,
        registered_only=function.learned.reported,
        max_wait_s=function.most_wait_s,
    )


def _request_id(call_id: str, *, own_id: bool) -> RequestId:
    """A unique id for each lease: two requests with one id are one request to the scheduler."""
    if own_id:
        return RequestId(call_id)
    plain = "".join(letter for letter in call_id[:_CALL_ID_LETTERS] if letter.isprintable())
    return RequestId(f"{plain}~{secrets.token_hex(6)}")


def _lines(granted: GrantedLease) -> tuple[bytes, ...]:
    addresses = ",".join(granted.addresses).encode("latin-1")
    token = granted.token.encode("latin-1")
    return (b"x-gpu-address: ", addresses, b"\r\nx-gpu-lease: ", token, b"\r\n")
