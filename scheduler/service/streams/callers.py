"""Callers' streams: questions for leases on one line of frames; leases end with their caller."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from common.frame_line import LineBroken
from common.http.server_protocol import AcceptedLine
from common.tasks import BackgroundTasks
from common.telemetry.traces import trace_of
from common.telemetry.work_context import ABOUT, Work
from common.time_limits import time_limit
from scheduler.api import Placement
from scheduler.model.errors import BadValue, NotLeading, RequestWithdrawn, SchedulerError
from scheduler.model.values import LeaseId, Request, RequestId
from scheduler.service import error_table
from scheduler.service.leadership.term import Office
from scheduler.service.metrics.counting import SchedulerCounters
from scheduler.service.request_bounds import check_report, check_request
from scheduler.wire.caller_stream import (
    BEAT_S,
    GREETING_S,
    MAX_FRAME_BYTES,
    MOST_TERM,
    Alive,
    AskLease,
    CallerDown,
    Cancel,
    GiveBack,
    Granted,
    Holds,
    Leads,
    MetTerm,
    Present,
    Ran,
    Recalled,
    Refused,
    SentAway,
    ToldTerms,
    read_up,
)
from scheduler.wire.codec import VERSION, other_version, pack
from scheduler.wire.refusals import refusal
from scheduler.wire.request_times import absolute, shifted

log = logging.getLogger(__name__)

_LONGEST_NAME = 64
# A caller that takes its answers no longer is hung up on; its questions are asked again elsewhere.
_MOST_UNSENT_BYTES = 16 << 20
_MOST_QUESTIONS = 100_000
_OK = 200

# The answer to a question of this number, whose caller has the placement's lease from now on.
Grant = Callable[[str, Placement, Request, int], Granted]

# A caller whose connection broke may connect again within this time.
RETURN_S = 1.0
_SPARE = 1_000


class CallerLeases:
    """Who acquired which lease; those of a caller end once the caller was present and is not.

    `lines` are the greeted lines of callers, by which leases are recalled.
    """

    def __init__(self) -> None:
        self.lines: dict[AcceptedLine, str] = {}
        self._present: Counter[str] = Counter()
        # Of each lease, or of each request's part of a shared one.
        self._holders: dict[tuple[LeaseId, RequestId | None], str] = {}
        self._most_holders = _SPARE

    @contextmanager
    def present(self, office: Office, caller: str) -> Iterator[None]:
        """Count a connection; the caller's leases are released a moment after its last one."""
        self._present[caller] += 1
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(RETURN_S, self._left, office, caller)

    def granted(
        self, office: Office, caller: str, lease: LeaseId, request: RequestId | None = None
    ) -> None:
        """Note that this caller has the lease; a caller without a name keeps it without presence.

        Of a lease that several requests have it has only the part of the named one. A caller may
        connect a moment after its first leases.
        """
        in_force = office.core.leases
        live_lease = in_force.get(lease)
        if caller and live_lease is not None and not (live_lease.is_shared and request is None):
            self._holders[lease, request if live_lease.is_shared else None] = caller
        if len(self._holders) > self._most_holders:  # some leases end without a release
            holders = self._holders.items()
            self._holders = {held: who for held, who in holders if held[0] in in_force}
            self._most_holders = 2 * len(self._holders) + _SPARE

    def recall(self, lease: LeaseId) -> None:
        """Recall a lease from its caller, after the task that was granted it just now resumes."""
        asyncio.get_running_loop().call_soon(self._recall, lease)

    def _recall(self, lease: LeaseId) -> None:
        """A caller that is gone loses its leases anyway."""
        caller = self._holders.get((lease, None))  # nobody keeps one that is shared
        for line, name in self.lines.items():
            if name == caller:
                line.send(pack(Recalled(lease)))

    def released(self, lease: LeaseId, request: RequestId | None = None) -> None:
        """Forget a lease that was released, by one of its requests or as a whole."""
        self._holders.pop((lease, None), None)
        self._holders.pop((lease, request), None)

    def _left(self, office: Office, caller: str) -> None:
        self._present[caller] -= 1
        if self._present[caller]:
            return
        del self._present[caller]
        for lease, request in [held for held, who in self._holders.items() if who == caller]:
            del self._holders[lease, request]
            if not office.closed and lease in office.core.leases:
                office.driver.release(lease, request)


@dataclass(slots=True, eq=False)
class CallerStreams:
    """The streams of one leader's callers."""

    office: Office
    leases: CallerLeases
    meters: SchedulerCounters
    grant: Grant
    elsewhere: Callable[[], str | None]  # the URL of the next leader, if it is known
    fenced: Callable[[int], None]  # called when a caller has met a higher term than this leader's
    closed: bool = False

    async def serve(self, line: AcceptedLine) -> None:
        try:
            async with time_limit(GREETING_S):
                present = _checked(read_up(await line.receive()))
            if present.version != VERSION:
                why = other_version(present.version, "the caller", "this scheduler")
                log.warning("a caller's stream: %s", why)
                line.send(pack(SentAway(refusal=why)))
                await line.flush()
                return
            line.confirm()
            line.max_frame_bytes = MAX_FRAME_BYTES
            if self.closed:  # since it was dialled
                await self._send_away([line])
                return
            line.send(pack(Leads(self.office.term)))
            self.leases.lines[line] = present.caller
            with ExitStack() as presence:
                presence.enter_context(self.leases.present(self.office, present.caller))
                for feature in self.office.features:
                    presence.enter_context(feature.caller_present(present.caller))
                await _CallerStream(line, present.caller, self).serve()
        except (BadValue, LineBroken) as error:
            log.info("a caller's stream: %s", error)
        except TimeoutError:
            log.info("a caller's stream began with silence")
        finally:
            self.leases.lines.pop(line, None)

    async def close(self) -> None:
        """Send every caller to the next leader, also one that presents itself after this."""
        self.closed = True
        await self._send_away(list(self.leases.lines))

    async def _send_away(self, lines: Sequence[AcceptedLine]) -> None:
        for line in lines:
            line.send(pack(SentAway(self.elsewhere())))
        await asyncio.gather(*(line.flush() for line in lines))


class _CallerStream:
    """One caller's questions, each in a task of its own until it is answered."""

    def __init__(self, line: AcceptedLine, caller: str, streams: CallerStreams) -> None:
        self._line = line
        self._caller = caller
        self._office = streams.office
        self._streams = streams
        self._open: dict[int, RequestId] = {}
        self._asking: dict[RequestId, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks(log, "a caller's question")

    async def serve(self) -> None:
        """Take messages in until the line ends; then nobody waits for its questions any more."""
        self._tasks.start(_beat(self._line))
        try:
            await self._line.pump(self._take)
        finally:
            self._tasks.cancel()

    def _take(self, frame: bytes) -> None:
        """Take a message in; BadValue ends the stream."""
        message = read_up(frame)
        if isinstance(message, GiveBack):
            lease, request = message.lease, message.request
            self._office.driver.release(lease, request)
            self._streams.leases.released(lease, request)
            self._streams.meters.answered["/release", _OK] += 1
        elif isinstance(message, Ran):
            now_s = self._office.clock.now_s()
            for report in message.reports:
                self._office.driver.report(shifted(check_report(report), now_s))
            self._streams.meters.answered["/ran", _OK] += 1
        elif isinstance(message, Holds):
            for lease, request in message.requests:
                self._streams.leases.granted(self._office, self._caller, lease, request)
        elif isinstance(message, Cancel):
            self._cancel(message.request)
            self._streams.meters.answered["/cancel", _OK] += 1
        elif isinstance(message, ToldTerms):
            for feature in self._office.features:
                feature.told(self._caller, message)
        elif isinstance(message, MetTerm):
            self._step_down(message.term)
        elif isinstance(message, AskLease):
            self._begin(message)
        else:
            raise BadValue("a caller presents itself once")

    def _step_down(self, term: int) -> None:
        if not self._office.term < term <= MOST_TERM:
            raise BadValue(f"it has met term {term}, this one leads in {self._office.term}")
        log.warning("a caller has met a leader of term %d", term)
        self._streams.fenced(term)

    def _begin(self, question: AskLease) -> None:
        call, request = question.call, question.request.id
        if call in self._open or len(self._open) >= _MOST_QUESTIONS:
            raise BadValue(f"question {call} is one too many, or open already")
        self._open[call] = request
        task = self._asking[request] = self._tasks.start(self._answer(question))
        task.add_done_callback(lambda task: self._ended(call, task))

    def _ended(self, call: int, task: asyncio.Task[None]) -> None:
        request = self._open.pop(call)
        if self._asking.get(request) is task:
            del self._asking[request]

    def _cancel(self, request: RequestId) -> None:
        """End the request; its question may have come a moment ago, and not be taken up yet."""
        asking = self._asking.get(request)
        if asking is not None:
            asking.cancel()
        self._office.driver.cancel(request)

    async def _answer(self, question: AskLease) -> None:
        answer: CallerDown
        try:
            answer = await self._granted(question)
            status = _OK
        except SchedulerError as error:
            withdrawn = self._office.closed and isinstance(error, RequestWithdrawn)
            if withdrawn or isinstance(error, NotLeading):
                return  # the caller is sent to the next leader, and asks there
            answer = Refused(question.call, refusal(error))
            status = error_table.failure(error).status
        except Exception:
            self._line.abort()  # the caller would wait for ever
            raise
        self._streams.meters.answered["/acquire", status] += 1
        self._line.send(pack(answer))

    async def _granted(self, question: AskLease) -> Granted:
        office = self._office
        request = absolute(check_request(question.request), office.clock.now_s())
        request = replace(request, caller=self._caller if question.keeps else "")
        trace = trace_of(question.parent, question.state)
        ABOUT.set(Work(trace, function=request.function, request=request.id))
        placement = await office.acquire(request)
        return self._streams.grant(self._caller, placement, request, question.call)


def _checked(message: object) -> Present:
    if not isinstance(message, Present):
        raise BadValue("a stream begins with its caller's name")
    if not 0 < len(message.caller) <= _LONGEST_NAME:
        raise BadValue("the caller's name is empty or too long")
    return message


async def _beat(line: AcceptedLine) -> None:
    """Show that the leader lives; hang up on a caller that takes nothing."""
    alive = pack(Alive())
    while True:
        await asyncio.sleep(BEAT_S)
        line.send(alive)
        if line.unsent_bytes > _MOST_UNSENT_BYTES:
            log.warning("a caller does not keep up: %d bytes wait for it", line.unsent_bytes)
            line.abort()
