"""`python -m bench.stream_costs`: processor time of a message on a node stream, at each end.

The ends are the product's, each in a process of its own with the event loop that it has in earnest;
what an order or a report causes is left out. A sender is woken by a timer, whose own cost, measured
without messages, is subtracted.
"""

import argparse
import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple, cast

from bench.measure.child_process import ChildProcess, ParentPipe, child_process
from bench.measure.report import BenchReport, MeasurementFailed, load_average
from cache_manager.model.ids import GpuId, NodeId
from common.frames.stream_upgrade import StreamRequest
from common.http.accepted_line import AcceptedLine
from common.http.asgi import Receive, Scope, Send, send_text
from gpu_manager.attachment.attachment import Attachment
from scheduler.model.actions import Demote, Dispatch, EndLease, Prepare
from scheduler.model.events import Event, GpuSnapshot, NodeSnapshot, SlotFreed
from scheduler.model.values import GpuSpec, LeaseId, SlotId
from scheduler.service.driver.driver import Driver
from scheduler.service.http.scheduler_server import listen, serving
from scheduler.service.nodes.node_streams import NodeStreams

_SECRET, _NODE = b"the secret of the streams' bench", NodeId("node")
_SLOT, _GPU = SlotId("g0"), GpuId("g0")
_GOAL_US, _PATIENCE_S = 20.0, 20.0
_HEAD = """\
| way | messages a wake-up | sender µs a message | receiver µs a message |
| --- | ---: | ---: | ---: |"""
log = logging.getLogger(__name__)


class Burst(NamedTuple):
    """How many messages are sent, how many of them at each wake-up, and the pause between two."""

    messages: int
    at_once: int
    pause_s: float


_BURSTS = (Burst(4_000, 1, 0.001), Burst(32_000, 64, 0.004))


class StreamCosts(NamedTuple):
    """Processor time of a message, in seconds."""

    sender_s: float
    receiver_s: float


class EndUsage(NamedTuple):
    """What an end has received so far, and its processor time."""

    received: int
    processor_s: float


def main() -> None:
    """Measure both ways, one message a wake-up and many; print a table."""
    parser = argparse.ArgumentParser(prog="bench.stream_costs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="write to bench/results/ too")
    options = parser.parse_args()
    command = f"python -m bench.stream_costs --rounds {options.rounds}"
    report = BenchReport("What a message on a node stream costs", command)
    report.add(
        f"\nMedians of {options.rounds} alternating rounds. Down: orders to end a lease; up: reports "
        "that a slot is free. The scheduler's end runs on uvloop, the manager's on asyncio. "
        f"Load average before: {load_average()}.\n\n{_HEAD}"
    )
    reached = True
    for way, burst, costs in measured(options.rounds, _BURSTS):
        sender_us, receiver_us = costs.sender_s * 1e6, costs.receiver_s * 1e6
        report.add(f"| {way} | {burst.at_once} | {sender_us:.1f} | {receiver_us:.1f} |")
        reached = reached and max(sender_us, receiver_us) < _GOAL_US
    report.add(
        f"\nGoal: less than {_GOAL_US:g} µs on each side: {'reached' if reached else 'NOT reached'}. "
        f"Load average after: {load_average()}."
    )
    if options.keep:
        print(report.keep("stream-costs"))


def measured(rounds: int, bursts: Sequence[Burst]) -> Iterator[tuple[str, Burst, StreamCosts]]:
    """The medians of the rounds, for each way and burst."""
    with ExitStack() as stack:
        scheduler = stack.enter_context(child_process(_scheduler_end))
        url = scheduler.address
        manager = stack.enter_context(child_process(_manager_end, url, loop=asyncio.new_event_loop))
        ways = {"down": (scheduler, manager), "up": (manager, scheduler)}
        found: dict[tuple[str, Burst], list[StreamCosts]] = {}
        for _ in range(rounds):
            for burst in bursts:
                for way, (sender, receiver) in ways.items():
                    found.setdefault((way, burst), []).append(_costs(sender, receiver, burst))
        for (way, burst), costs in found.items():
            yield way, burst, StreamCosts(*map(median, zip(*costs, strict=True)))


def _costs(sender: ChildProcess, receiver: ChildProcess, burst: Burst) -> StreamCosts:
    before: EndUsage = receiver.ask("usage")
    sender_s = sender.ask(burst)
    patience_s = time.monotonic() + _PATIENCE_S
    while (after := cast(EndUsage, receiver.ask("usage"))).received < before.received + burst.messages:
        if time.monotonic() > patience_s:
            raise MeasurementFailed(f"{after.received - before.received} messages arrived")
        time.sleep(0.05)
    return StreamCosts(
        sender_s / burst.messages, (after.processor_s - before.processor_s) / burst.messages
    )


# -- the ends -----------------------------------------------------------------------------------


class _Counting:
    """Stands in for what takes orders at a manager, and reports at the scheduler."""

    addresses: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.received = 0

    def attach(self, node: NodeId, link: object) -> None:
        log.debug("node %s attaches by %s", node, link)

    def detach(self, node: NodeId) -> None:
        log.debug("node %s is detached", node)

    def report(self, event: Event) -> None:
        if isinstance(event, SlotFreed):
            self.received += 1

    def whole_state(self) -> Sequence[Event]:
        spec = GpuSpec(_GPU, _NODE, 8 << 30)
        return [NodeSnapshot(_NODE, (GpuSnapshot(spec),))]

    def prepare(self, order: Prepare) -> None:
        raise MeasurementFailed(f"{order} was not sent")

    def grant(self, order: Dispatch) -> None:
        raise MeasurementFailed(f"{order} was not sent")

    def demote(self, order: Demote) -> None:
        raise MeasurementFailed(f"{order} was not sent")

    def end_lease(self, order: EndLease) -> None:
        del order
        self.received += 1

    def contended(self, *, waiting: bool) -> None:
        log.debug("contended: %s", waiting)


async def _scheduler_end(parent: ParentPipe) -> None:
    counting = _Counting()
    streams = NodeStreams(cast(Driver, counting), lambda: 1, _SECRET, log)

    async def serve(request: StreamRequest, line: AcceptedLine) -> None:
        del request
        await streams.serve(line, _NODE)

    def send(number: int) -> None:
        streams.attached[_NODE].end_lease(EndLease(_SLOT, LeaseId(number), "it was released"))

    listener = listen("127.0.0.1", 0)
    async with serving(_nothing, listener, streams=serve):
        parent.ready(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await _answer_orders(parent, counting, send)
        await streams.close()


async def _manager_end(parent: ParentPipe, url: str) -> None:
    counting = _Counting()
    attachment = Attachment([url], _NODE, _SECRET)
    attachment.attach(_NODE, counting)
    await attachment.attached()
    parent.ready()
    await _answer_orders(
        parent, counting, lambda number: attachment.report(SlotFreed(_SLOT, LeaseId(number)))
    )
    attachment.detach(_NODE)
    await attachment.close()


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    del receive
    await send_text(send, 404, scope["path"])


async def _answer_orders(
    parent: ParentPipe, counting: _Counting, send: Callable[[int], None]
) -> None:
    """Send bursts, and answer with their processor time; or answer how much has been received."""
    while (order := await parent.order()) is not None:
        if isinstance(order, Burst):
            idle_s = await _processor_s(order, _ignore)
            parent.answer(await _processor_s(order, send) - idle_s)
        else:
            parent.answer(EndUsage(counting.received, time.process_time()))


async def _processor_s(burst: Burst, send: Callable[[int], None]) -> float:
    began_s = time.process_time()
    for first in range(0, burst.messages, burst.at_once):
        for number in range(first, first + burst.at_once):
            send(number)
        await asyncio.sleep(burst.pause_s)
    return time.process_time() - began_s


def _ignore(number: int) -> None:
    del number


if __name__ == "__main__":
    main()
