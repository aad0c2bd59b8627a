"""GPU leases for calls: acquired from the scheduler before a call, given back after it."""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from common.telemetry.traces import TraceContext
from gateway_ext import error_statuses
from gateway_ext.calls.function_table import Function
from gateway_ext.calls.kept_leases import (
    Found,
    KeptLease,
    KeptLeases,
    LeaseHome,
    LeaseKind,
    OwnLease,
)
from gateway_ext.calls.limits import CallPart
from gateway_ext.metrics import GatewayMeters
from gateway_ext.tracing.journey import LEASE, Journey
from scheduler.api import (
    EventRefused,
    LeaseUse,
    NodeId,
    OwnerTerms,
    Placement,
    QueueFull,
    Request,
    RequestFailed,
    RequestId,
    RequestWithdrawn,
    SchedulerError,
)
from scheduler.client.lease_client import LeaseKeeper
from scheduler.wire.caller_stream import Granted

_CALL_ID_LETTERS = 64


class LeaseSource(LeaseHome, Protocol):
    """Where leases come from: `scheduler.client.lease_client.LeaseClient`."""

    async def acquire(self, request: Request, trace: TraceContext | None = None) -> Granted:
        """Wait for a lease, for this trace; cancelling the task cancels the request."""

    def let_stand(self, keeper: LeaseKeeper) -> None:
        """Let leases stand from now on; this keeper is told which are wanted back."""

    def tell_terms(self, function: str, terms: OwnerTerms | None) -> None:
        """Have the scheduler know the function's own terms; None: it has none."""


class CallLease(NamedTuple):
    """A lease for one call; `lines` pass it to a function.

    `request` is what the scheduler knows the call by. `kept` is set if the lease may outlive it.
    """

    placement: Placement
    request: RequestId
    lines: tuple[bytes, ...]
    kept: KeptLease | None = None


class GpuLeasing:
    """Leases for the calls of GPU functions."""

    def __init__(self, leases: LeaseSource, meters: GatewayMeters) -> None:
        self._leases = leases
        self._meters = meters
        self._kept = KeptLeases(leases)
        leases.let_stand(self._kept)

    @property
    def kept_leases(self) -> int:
        return len(self._kept)

    def instance_for(self, function: Function) -> str:
        """The instance that best takes the next call, as it has a lease for it; empty: any."""
        if len(function.instances) == 1:
            return ""
        return self._kept.claimed_by(_kind(function))

    async def acquire(
        self,
        function: Function,
        instance: str,
        journey: Journey,
        deadline_s: float,
        *,
        own_id: bool,
        near: str = "",
        part: CallPart | None = None,
    ) -> CallLease | None:
        """A lease for the models that the call is expected to use, waited for until `deadline_s`.

        None if no model is expected, or if the scheduler no longer knows the models: the function
        then asks for its GPU by itself. NoGpu if the scheduler refuses. `instance` is the address
        that the call goes to; `own_id`: no other call can have this id. `near` is the node that has
        the call's data, if that is known, `part` is set of a call that is a stage of a workflow.
        """
        if not function.learned.models:
            return None
        attempt = journey.attempts[-1]
        request_id = _request_id(journey.call_id, attempt.number, own_id=own_id)
        request = _request(function, request_id, deadline_s, near)
        request = request if part is None else _of_workflow(request, part)
        attempt.request = request.id
        trace = journey.context(LEASE, attempt.number)
        kind = _kind(function)
        asked_s = time.monotonic()
        asked: list[RequestId] = []

        def ask(question: RequestId) -> Coroutine[None, None, Granted]:
            asked.append(question)
            return self._leases.acquire(replace(request, id=question), trace)

        try:
            given = await self._kept.lease_for(kind, instance, request.id, ask)
        except asyncio.CancelledError:
            self._meters.lease("cancelled", time.monotonic() - asked_s)
            raise
        except SchedulerError as error:
            self._refused(function, journey, error, asked_s)
            return None
        attempt.leased_s = time.monotonic()
        # The call's own question may still be asked, on behalf of another call.
        use_id = RequestId(f"{request.id}~kept") if request.id in asked else request.id
        use = LeaseUse(use_id, asked_s, attempt.leased_s, parent=trace.header)
        own = isinstance(given, OwnLease) and given.request == request.id
        lease, hit = self._taken(kind, instance, given, use, own=own)
        attempt.request, attempt.placement = lease.request, lease.placement
        self._meters.lease("hit" if hit else "miss", attempt.leased_s - asked_s)
        return lease

    def release(self, lease: CallLease, *, clean: bool) -> None:
        """The call is over: give its lease back, or leave it to the next call.

        Without `clean` the function may still be at work for this call.
        """
        if lease.kept is None:
            self._leases.release(lease.placement.lease, lease.request)
        else:
            self._kept.end(lease.kept, lease.request, clean=clean)

    def _taken(
        self, kind: LeaseKind, instance: str, given: Found, use: LeaseUse, *, own: bool
    ) -> tuple[CallLease, bool]:
        """The lease for the call, and whether its models were resident."""
        if isinstance(given, KeptLease):
            return self._next(given, instance, use), True
        granted, hit = given.granted, given.granted.placement.hit
        if granted.placement.stands is None:
            return CallLease(granted.placement, given.request, granted.header_lines()), hit
        kept = self._kept.keep(kind, instance, granted, replace(use, request=given.request))
        if own:
            return CallLease(granted.placement, given.request, kept.lines, kept), hit
        # The question was asked for what its own call no longer needed.
        kept.end(given.request, use.began_s)
        return self._next(kept, instance, use), hit

    def _next(self, kept: KeptLease, instance: str, use: LeaseUse) -> CallLease:
        self._kept.begin(kept, instance, use)
        return CallLease(kept.granted.placement, use.request, kept.lines, kept)

    def _refused(
        self, function: Function, journey: Journey, error: SchedulerError, asked_s: float
    ) -> None:
        """Continue without a lease if the scheduler does not know the models; else raise NoGpu."""
        if isinstance(error, EventRefused | RequestFailed | RequestWithdrawn):
            text = "call %s: %s continues without a lease: %s"
            cause = type(error).__name__
            function.log.log(logging.INFO, cause, text, journey.call_id, function.id, error)
            function.learned.forget()
            self._meters.lease("refused", time.monotonic() - asked_s)
            journey.attempts[-1].leased_s = time.monotonic()
            return
        if isinstance(error, QueueFull):
            function.waits.saw_full_gpus(error.wait_s, function.most_wait_s, time.monotonic())
        self._meters.lease(type(error).__name__, time.monotonic() - asked_s)
        raise error_statuses.no_gpu(error) from error


def _kind(function: Function) -> LeaseKind:
    together = max(1, function.options.batches.most)
    return LeaseKind(function.id.for_scheduler, function.learned.models, together)


def _request(function: Function, request: RequestId, deadline_s: float, near: str) -> Request:
    options = function.options
    return Request(
        id=request,
        function=function.id.for_scheduler,
        models=function.learned.models,
        deadline_s=deadline_s,
        priority=options.priority,
        slo_s=options.slo_s,
        near=NodeId(near) if near else None,
        registered_only=function.learned.reported,
        max_wait_s=function.most_wait_s,
        exit_rule=options.exit_rule,
    )


def _of_workflow(request: Request, part: CallPart) -> Request:
    wait_s = None if part.later else request.max_wait_s
    return replace(
        request,
        application=part.workflow,
        stage=part.stage,
        slo_s=request.slo_s if part.slo_s is None else part.slo_s,
        max_wait_s=part.within_s if wait_s is None else min(wait_s, part.within_s),
    )


def _request_id(call_id: str, attempt: int, *, own_id: bool) -> RequestId:
    """A unique id for each lease: two requests with one id are one request to the scheduler.

    What an earlier attempt asked for may still be asked for, or have been given back.
    """
    if own_id:
        return RequestId(f"{call_id}~{attempt + 1}" if attempt else call_id)
    return RequestId(f"{call_id[:_CALL_ID_LETTERS]}~{secrets.token_hex(6)}")
