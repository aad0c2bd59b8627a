"""`python -m bench.stream_costs`: processor time of a message on a node stream, at each end.

The ends are the product's, each in a process of its own with the event loop that it has in earnest;
what an order or a report causes is left out.
"""

import argparse
import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import NamedTuple, cast

from bench.measure.child_process import ChildProcess, ParentPipe, child_process
from bench.measure.report import BenchReport, MeasurementFailed, load_average
from cache_manager.model.ids import GpuId, NodeId
from common.http.asgi import Receive, Scope, Send, send_text
from common.http.server_protocol import AcceptedLine
from common.stream_upgrade import StreamRequest
from gpu_manager.attachment.attachment import Attachment
from scheduler.model.actions import (
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    EndLease,
    Prepare,
)
from scheduler.model.events import Event, GpuSnapshot, NodeSnapshot, SlotFreed
from scheduler.model.values import GpuSpec, LeaseId, SlotId
from scheduler.service.driver import Driver
from scheduler.service.http.app import listen, serving
from scheduler.service.streams.nodes import NodeStreams

_SECRET, _NODE = b"the secret of the streams' bench", NodeId("node")
_SLOT = SlotId("g0")
_GOAL_US, _PATIENCE_S, _LOOK_S = 20.0, 20.0, 0.05
_AT_ONCE, _PAUSE_S = 64, 0.004
_BARE = b"x" * 65  # as long as an order that ends a lease
log = logging.getLogger(__name__)


class Way(StrEnum):
    """Who sends what: down are orders to end a lease, up are reports that a slot is free."""

    TURNS = "one a wake-up: an order, its report, the next order"
    BARE = "the same with bytes that nobody reads, without frames and messages"
    DOWN = f"{_AT_ONCE} orders a wake-up"
    UP = f"{_AT_ONCE} reports a wake-up"


@dataclass(frozen=True, slots=True)
class SendOrder:
    """What an end is to send, and how much of it."""

    way: Way
    messages: int


class EndUsage(NamedTuple):
    """What an end has received so far, and its processor time."""

    received: int
    processor_s: float


class StreamCosts(NamedTuple):
    """Processor time of a message at each end, in seconds."""

    scheduler_s: float
    manager_s: float


def main() -> None:
    """Measure both ways, one message a wake-up and many; print a table."""
    parser = argparse.ArgumentParser(prog="bench.stream_costs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bursts", type=int, default=250, help=f"of {_AT_ONCE}, a way and round")
    parser.add_argument("--keep", action="store_true", help="write to bench/results/ too")
    options = parser.parse_args()
    command = f"python -m bench.stream_costs --rounds {options.rounds}"
    report = BenchReport("What a message on a node stream costs", command)
    report.add(
        f"\nProcessor time of a message that is sent or received, medians of {options.rounds} "
        "alternating rounds. The scheduler's end runs on uvloop, the manager's on asyncio. "
        f"Load average before: {load_average()}.\n\n"
        "| messages | scheduler's end, µs | manager's end, µs |\n| --- | ---: | ---: |"
    )
    dearest_us = 0.0
    for way, costs in measured(options.rounds, options.bursts * _AT_ONCE):
        scheduler_us, manager_us = costs.scheduler_s * 1e6, costs.manager_s * 1e6
        report.add(f"| {way} | {scheduler_us:.1f} | {manager_us:.1f} |")
        if way is not Way.BARE:
            dearest_us = max(dearest_us, scheduler_us, manager_us)
    reached = "reached" if dearest_us < _GOAL_US else "NOT reached"
    report.add(f"\nGoal: less than {_GOAL_US:g} µs on each side: {reached}.")
    report.add(f"Load average after: {load_average()}.")
    if options.keep:
        print(report.keep("stream-costs"))


def measured(rounds: int, messages: int) -> Iterator[tuple[Way, StreamCosts]]:
    """The medians of the rounds of each way."""
    with ExitStack() as stack:
        scheduler = stack.enter_context(child_process(_scheduler_end))
        manager = stack.enter_context(
            child_process(_manager_end, scheduler.address, loop=asyncio.new_event_loop)
        )
        found: dict[Way, list[StreamCosts]] = {way: [] for way in Way}
        for _ in range(rounds):
            for way, costs in found.items():
                costs.append(_costs(scheduler, manager, SendOrder(way, messages)))
    for way, costs in found.items():
        yield way, StreamCosts(*map(median, zip(*costs, strict=True)))


def _costs(scheduler: ChildProcess, manager: ChildProcess, order: SendOrder) -> StreamCosts:
    ends = scheduler, manager
    sender, receiver = (manager, scheduler) if order.way is Way.UP else ends
    before = _usages(ends)
    wanted = _usages((receiver,))[0].received + order.messages
    sender.ask(order)
    patience_s = time.monotonic() + _PATIENCE_S
    while (come := _usages((receiver,))[0].received) < wanted:
        if time.monotonic() > patience_s:
            raise MeasurementFailed(f"{wanted - come} messages have not arrived")
        time.sleep(_LOOK_S)
    after = _usages(ends)
    # In a turn each end sends one message and receives one.
    share = order.messages * (2 if order.way in {Way.TURNS, Way.BARE} else 1)
    return StreamCosts(
        *(
            (now.processor_s - then.processor_s) / share
            for then, now in zip(before, after, strict=True)
        )
    )


def _usages(ends: Sequence[ChildProcess]) -> list[EndUsage]:
    return [cast(EndUsage, end.ask("usage")) for end in ends]


# -- the ends -----------------------------------------------------------------------------------


class _StreamEnd:
    """Stands in for what takes orders at a manager, and for what takes reports at the scheduler.

    In a turn the number of the lease is the number of turns that are left.
    """

    def __init__(self, send: Callable[[int, Way], None]) -> None:
        self.received = 0
        self._send = send

    def attach(self, node: NodeId, link: object) -> None:
        log.debug("node %s attaches by %s", node, link)

    def detach(self, node: NodeId) -> None:
        log.debug("node %s is detached", node)

    def report(self, event: Event) -> None:
        if isinstance(event, SlotFreed):
            self.received += 1
            if event.lease > 1:
                self._send(event.lease - 1, Way.TURNS)

    def whole_state(self) -> Sequence[Event]:
        spec = GpuSpec(GpuId("g0"), _NODE, 8 << 30)
        return [NodeSnapshot(_NODE, (GpuSnapshot(spec),))]

    def prepare(self, order: Prepare) -> None:
        raise MeasurementFailed(f"{order} was not sent")

    def grant(self, order: Dispatch) -> None:
        raise MeasurementFailed(f"{order} was not sent")

    def demote(self, order: Demote) -> None:
        raise MeasurementFailed(f"{order} was not sent")

    def end_context(self, order: EndContext) -> None:
        raise MeasurementFailed(f"{order} was not sent")

    def demote_stored(self, order: DemoteStored) -> None:
        raise MeasurementFailed(f"{order} was not sent")

    def end_lease(self, order: EndLease) -> None:
        self.received += 1
        if order.reason == Way.TURNS:
            self._send(order.lease, Way.TURNS)

    def contended(self, *, waiting: bool) -> None:
        log.debug("contended: %s", waiting)


class _BareEnd(asyncio.Protocol):
    """Takes turns with the other end in bytes that mean nothing."""

    def __init__(self) -> None:
        self.received = 0
        self._left: float = float("inf")
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += len(data) // len(_BARE)
        if self._left > 0:
            self.turn()

    def begin(self, turns: int) -> None:
        """Begin so many turns; the other end answers each."""
        self._left = turns
        self.turn()

    def turn(self) -> None:
        assert self._transport is not None, "the ends are connected"
        self._left -= 1
        self._transport.write(_BARE)


async def _scheduler_end(parent: ParentPipe) -> None:
    def send(number: int, way: Way) -> None:
        streams.attached[_NODE].end_lease(EndLease(_SLOT, LeaseId(number), way))

    async def serve(request: StreamRequest, line: AcceptedLine) -> None:
        del request
        await streams.serve(line, _NODE)

    end, bare = _StreamEnd(send), _BareEnd()
    streams = NodeStreams(cast(Driver, end), lambda: 1, _SECRET, log)
    listener, bare_listener = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: bare, sock=bare_listener)
    async with server, serving(_nothing, listener, streams=serve):
        ports = [each.getsockname()[1] for each in (listener, bare_listener)]
        parent.ready(f"{ports[0]} {ports[1]}")
        await _answer_orders(parent, end, bare, send)
        await streams.close()


async def _manager_end(parent: ParentPipe, ports: str) -> None:
    def send(number: int, way: Way) -> None:
        del way
        attachment.report(SlotFreed(_SLOT, LeaseId(number)))

    end, bare = _StreamEnd(send), _BareEnd()
    port, bare_port = ports.split()
    attachment = Attachment([f"http://127.0.0.1:{port}"], _NODE, _SECRET)
    attachment.attach(_NODE, end)
    await attachment.attached()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(lambda: bare, "127.0.0.1", int(bare_port))
    parent.ready()
    await _answer_orders(parent, end, bare, send)
    transport.close()
    attachment.detach(_NODE)
    await attachment.close()


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    del receive
    await send_text(send, 404, scope["path"])


async def _answer_orders(
    parent: ParentPipe, end: _StreamEnd, bare: _BareEnd, send: Callable[[int, Way], None]
) -> None:
    """Send what is ordered, or answer how much has been received at what cost."""
    while (order := await parent.order()) is not None:
        if not isinstance(order, SendOrder):
            parent.answer(EndUsage(end.received + bare.received, time.process_time()))
            continue
        if order.way is Way.BARE:
            bare.begin(order.messages)
        elif order.way is Way.TURNS:
            send(order.messages, order.way)
        else:
            await _burst(order, send)
        parent.answer(None)


async def _burst(order: SendOrder, send: Callable[[int, Way], None]) -> None:
    for _ in range(order.messages // _AT_ONCE):
        for _ in range(_AT_ONCE):
            send(0, order.way)
        await asyncio.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
