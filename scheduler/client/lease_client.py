"""The gateways' client: leases over one stream to the leader, and to the next one after it."""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple, Self

from common.errors import StreamRefused
from common.frame_line import FrameLine, LineBroken
from common.stream_upgrade import dial
from common.telemetry.traces import TraceContext
from common.time_limits import time_limit
from scheduler.client.scheduler_urls import SchedulerUrls
from scheduler.model.errors import BadValue, SchedulerError, SchedulerUnreachable
from scheduler.model.events import LeaseUsed
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import LeaseId, Request, RequestId
from scheduler.wire.caller_stream import (
    GREETING_S,
    MAX_FRAME_BYTES,
    MOST_LEASES,
    PATH,
    SILENCE_S,
    AskLease,
    CallerUp,
    Cancel,
    FunctionTerms,
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
    read_down,
)
from scheduler.wire.codec import VERSION, pack
from scheduler.wire.refusals import error_of
from scheduler.wire.request_times import relative, shifted

log = logging.getLogger(__name__)

# Reports that no leader has heard wait for the next one, so many at most.
_MOST_REPORTS = 1_000
# Calls in one frame; each takes about 250 bytes, and what a lease is held for less.
_MOST_CALLS = 1_000
# Functions whose terms are in one frame.
_MOST_FUNCTIONS = 500
# A leader may die while a release that it took still waits for its node's stream, this long; and
# what was sent on a line that broke may never have arrived.
_REPEATED_S = 12.0
_MOST_SAID = 8_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
_Broken = OSError, LineBroken, StreamRefused, BadValue


Answered = Callable[[Granted | SchedulerError], None]


class _Question(NamedTuple):
    """An unanswered question, with the times of this process."""

    request: Request
    trace: TraceContext | None
    answered: Answered
    asked_s: float


class LeaseClient:
    """Asks any of several schedulers, one of which leads; use as a context.

    A question whose leader goes away is asked again of the next one, with its id and its time of
    arrival, until a leader answers or none has been found for `patience_s`. The next leader also
    hears the last releases and cancellations again: the earlier one may have died before it applied
    them. A leader that is silent counts as gone. The leases end with this process. All times of
    requests are those of `time.monotonic` in this process.
    """

    def __init__(self, urls: Sequence[str], token: str, *, patience_s: float = 30.0) -> None:
        self._schedulers = SchedulerUrls(urls)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._patience_s = patience_s
        self._caller = secrets.token_hex(16)
        self._numbers = count(1)
        self._questions: dict[int, _Question] = {}
        self._held: dict[LeaseId, dict[RequestId, None]] = {}
        # When leases were given back and requests cancelled: the next leader hears of it again.
        self._said_s: OrderedDict[GiveBack | Cancel, float] = OrderedDict()
        self._line: FrameLine | None = None
        self._term = 0
        self._without_leader_s = 0.0
        self._staying: asyncio.Task[None] | None = None
        self._unreported: deque[LeaseUsed] = deque(maxlen=_MOST_REPORTS)
        self._terms: dict[str, OwnerTerms] = {}
        self._tells_terms = False
        self._recalled: Callable[[LeaseId], None] | None = None

    async def __aenter__(self) -> Self:
        self._without_leader_s = time.monotonic()
        self._staying = asyncio.create_task(self._stay(), name="caller stream")
        return self

    async def __aexit__(self, *failure: object) -> None:
        assert self._staying is not None, "it was entered"
        self._staying.cancel()
        await asyncio.wait({self._staying})
        self._end_questions("this client has ended", before_s=float("inf"))

    def let_stand(self, recalled: Callable[[LeaseId], None]) -> None:
        """Let leases stand from now on; `recalled` is told which are wanted back.

        Those are all of them when the stream to their leader ends.
        """
        self._recalled = recalled

    def ask(self, request: Request, trace: TraceContext | None, answered: Answered) -> int:
        """Ask for a lease, for this trace; the answer comes later, unless it is withdrawn.

        It is RequestEnded if the request ends without a lease, NoGpus if there is no GPU,
        EventRefused if the request is invalid, SchedulerUnreachable if no scheduler leads.
        """
        self._said_s.pop(Cancel(request.id), None)  # a call that is tried again keeps its id
        call, now_s = next(self._numbers), time.monotonic()
        question = self._questions[call] = _Question(request, trace, answered, now_s)
        self._send_question(call, question, now_s)
        return call

    def withdraw(self, question: int) -> None:
        """Take a question back that has no answer, and end its request."""
        self._say(Cancel(self._questions.pop(question).request.id))

    def release(self, lease: LeaseId, request: RequestId | None = None) -> None:
        """The holder no longer needs the GPU; of a lease that several have, the named request."""
        self._drop(lease, request)
        self._say(GiveBack(lease, request))

    def _drop(self, lease: LeaseId, request: RequestId | None) -> None:
        """Hold a lease no more; of one that others share, only this request's part."""
        holders = self._held.get(lease, {})
        if request is not None:
            holders.pop(request, None)
        if request is None or not holders:
            self._held.pop(lease, None)

    def report(self, reports: Sequence[LeaseUsed]) -> None:
        """Tell what ran under leases that are kept; their calls are in order."""
        self._unreported.extend(reports)
        while self._line is not None and self._unreported:
            self._send(Ran(tuple(self._first_reports())))

    def _first_reports(self) -> Iterator[LeaseUsed]:
        """The reports that have waited longest, as many as a frame has room for."""
        by_s, calls = -time.monotonic(), 0
        while self._unreported and calls < _MOST_CALLS:
            report = self._unreported.popleft()
            calls += len(report.uses) + len(report.ends)
            yield shifted(report, by_s)

    def _say(self, message: GiveBack | Cancel) -> None:
        self._said_s[message] = time.monotonic()
        self._said_s.move_to_end(message)
        if len(self._said_s) > _MOST_SAID:
            self._said_s.popitem(last=False)
        self._forget_said()
        self._send(message)

    def _forget_said(self) -> None:
        """Forget what was said so long before now, or before there was no leader any more."""
        led_s = self._without_leader_s if self._line is None else time.monotonic()
        while self._said_s and next(iter(self._said_s.values())) < led_s - _REPEATED_S:
            self._said_s.popitem(last=False)

    def tell_terms(self, function: str, terms: OwnerTerms | None) -> None:
        """Tell what a function says of itself, this leader and the following ones; None: nothing.

        Questions that are asked after this are answered by these terms.
        """
        if terms == self._terms.get(function):
            return
        if terms is None:
            del self._terms[function]
        else:
            self._terms[function] = terms
        self._tells_terms = True
        self._send(ToldTerms((FunctionTerms(function, terms),)))

    # -- questions --------------------------------------------------------------------------------

    def _send_question(self, call: int, question: _Question, now_s: float) -> None:
        sent, trace = relative(question.request, question.asked_s, now_s), question.trace
        parent, state = ("", "") if trace is None else (trace.header, trace.state)
        self._send(AskLease(call, sent, parent, state, keeps=self._recalled is not None))

    def _send(self, message: CallerUp) -> None:
        if self._line is not None:
            self._line.send(pack(message))

    def _end_questions(self, why: str, before_s: float) -> None:
        for call, question in list(self._questions.items()):
            if question.asked_s <= before_s and self._questions.pop(call, None) is not None:
                question.answered(SchedulerUnreachable(why))

    # -- the stream -------------------------------------------------------------------------------

    async def _stay(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            at = self._schedulers.at
            try:
                led = await self._be_served(at)
                trouble = f"{at} leads no more"
            except TimeoutError:
                led, trouble = False, f"{at} is silent"
                self._schedulers.move(at)
            except _Broken as error:
                led, trouble = self._line is not None, f"{at}: {error}"
                self._schedulers.move(at)
            if self._line is not None:
                self._line, self._without_leader_s = None, time.monotonic()
                for lease in list(self._held):
                    self._recall(lease)
                log.info("the stream to the scheduler has ended: %s", trouble)
            pause_s = _FIRST_PAUSE_S if led else pause_s
            before_s = time.monotonic() - self._patience_s
            if self._without_leader_s <= before_s:
                self._end_questions(f"no scheduler leads: {trouble}", before_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _be_served(self, at: str) -> bool:
        """Be served by the scheduler at this URL until it leads no more; whether it led."""
        async with time_limit(GREETING_S):
            line = await dial(at, PATH, self._headers, MAX_FRAME_BYTES)
        async with line:
            line.send(pack(Present(VERSION, self._caller)))
            async with time_limit(GREETING_S):
                first = read_down(await line.receive())
            if isinstance(first, SentAway):
                if first.refusal:
                    raise BadValue(first.refusal)
                self._schedulers.move(at, first.leader)
                return False
            if not isinstance(first, Leads):
                raise BadValue("a leader begins by its term")
            if first.term < self._term:
                line.send(pack(MetTerm(self._term)))
                raise BadValue(f"it leads in term {first.term}, and term {self._term} has begun")
            self._take_up(line, first.term)
            return await self._listen(line, at)

    def _take_up(self, line: FrameLine, term: int) -> None:
        """Use this line: repeat what its leader may not know, and ask what is unanswered."""
        self._forget_said()
        self._line, self._term = line, term
        held = [(lease, request) for lease, requests in self._held.items() for request in requests]
        for begin in range(0, len(held), _MOST_CALLS):
            self._send(Holds(tuple(held[begin : begin + _MOST_CALLS])))
        if self._unreported:
            self.report(())
        self._tell_all_terms()
        for message in list(self._said_s):
            self._send(message)
        now_s = time.monotonic()  # one for all, or a hold-up between two would change their order
        for call, question in self._questions.items():
            self._send_question(call, question, now_s)

    def _tell_all_terms(self) -> None:
        """Nothing is sent by a client that never told any."""
        if not self._tells_terms:
            return
        told = [FunctionTerms(function, terms) for function, terms in self._terms.items()]
        for begin in range(0, max(1, len(told)), _MOST_FUNCTIONS):
            part = tuple(told[begin : begin + _MOST_FUNCTIONS])
            self._send(ToldTerms(part, begins=begin == 0))

    async def _listen(self, line: FrameLine, at: str) -> bool:
        sent_away: list[SentAway] = []
        loop = asyncio.get_running_loop()
        async with time_limit(SILENCE_S) as patience:

            def take(frame: bytes) -> None:
                message = read_down(frame)
                patience.reschedule(loop.time() + SILENCE_S)
                if isinstance(message, Granted):
                    self._grant(message)
                elif isinstance(message, Refused):
                    self._refuse(message)
                elif isinstance(message, Recalled):
                    self._recall(message.lease)
                elif isinstance(message, SentAway):
                    sent_away.append(message)

            try:
                await line.pump(take)
            except LineBroken:
                if not sent_away:
                    raise
                self._schedulers.move(at, sent_away[0].leader)
        return True

    def _grant(self, granted: Granted) -> None:
        lease = granted.placement.lease
        question = self._questions.pop(granted.call, None)
        if question is None:
            return  # it was withdrawn, and so is its request
        self._held.setdefault(lease, {})[question.request.id] = None
        if len(self._held) > MOST_LEASES:
            del self._held[next(iter(self._held))]
        question.answered(granted)

    def _recall(self, lease: LeaseId) -> None:
        if self._recalled is not None:
            self._recalled(lease)

    def _refuse(self, refused: Refused) -> None:
        error = error_of(refused.refusal)  # of a name that is not known: the question stays asked
        question = self._questions.pop(refused.call, None)
        if question is not None:
            question.answered(error)
