"""Times between two clocks: seconds from now on, negative where they have passed."""

from msgspec.structs import replace

from scheduler.model.events import LeaseUsed
from scheduler.model.values import CallEnd, Request


def relative(request: Request, asked_s: float, now_s: float) -> Request:
    """The request as a process sends it at `now_s`; it arrived at `asked_s` unless it says when."""
    deadline_s = request.deadline_s
    arrived_s = asked_s if request.arrived_s is None else request.arrived_s
    return replace(
        request,
        deadline_s=None if deadline_s is None else deadline_s - now_s,
        arrived_s=min(0.0, arrived_s - now_s),
    )


def absolute(request: Request, now_s: float) -> Request:
    """The request as it was received, with its times on the clock that says `now_s`."""
    deadline_s, arrived_s = request.deadline_s, request.arrived_s
    return replace(
        request,
        deadline_s=None if deadline_s is None else now_s + deadline_s,
        arrived_s=None if arrived_s is None else max(0.0, min(now_s, now_s + arrived_s)),
    )


def shifted(report: LeaseUsed, by_s: float) -> LeaseUsed:
    """The report with its times on another clock, which is ahead by so much."""
    return replace(
        report,
        uses=tuple(
            replace(
                use,
                arrived_s=use.arrived_s + by_s,
                began_s=use.began_s + by_s,
                ended_s=None if use.ended_s is None else use.ended_s + by_s,
            )
            for use in report.uses
        ),
        ends=tuple(CallEnd(end.request, end.ended_s + by_s) for end in report.ends),
    )
