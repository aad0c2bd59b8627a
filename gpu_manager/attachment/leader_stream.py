"""The stream to the leader: finds it, connects, reconnects after a break, and closes."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from common.errors import StreamRefused
from common.frame_line import FrameLine, LineBroken
from common.stream_upgrade import dial
from common.tasks import error_of
from common.time_limits import time_limit
from gpu_manager.errors import BadSetting, GpuManagerError, NoScheduler
from scheduler.api import BadValue, LeaseReleased, NodeId, RequestCancelled
from scheduler.wire.codec import VERSION, other_version, pack
from scheduler.wire.node_stream import (
    ACKNOWLEDGED_AT_ONCE,
    MAX_GREETING_BYTES,
    MAX_MESSAGE_BYTES,
    Answer,
    Beat,
    Challenge,
    Contended,
    Given,
    Greeting,
    Hello,
    Leave,
    Report,
    Resume,
    StreamTimes,
    Superseded,
    TurnedAway,
    Up,
    UpChannel,
    Welcome,
    is_proven,
    proven,
    read_greeting,
    stream_path,
)

log = logging.getLogger(__name__)

_POLL_S = 0.01
_RETRY_S = 0.05  # the first pause before the schedulers are dialed again
_MOST_UNSENT = 4096
# Events that are reported once and that no snapshot contains.
_OneTimeEvent = LeaseReleased | RequestCancelled


_SCHEMES = frozenset({"http", "https"})
_Broken = OSError, TimeoutError, LineBroken, StreamRefused, BadValue


@dataclass(frozen=True, slots=True)
class Dialed:
    """A line to a scheduler that accepted this manager; `run` identifies its process."""

    line: FrameLine
    run: str
    welcome: Welcome
    url: str


class Dialer:
    """Connects to the leading scheduler, and keeps the highest term that any of them reported.

    A scheduler with a lower term is rejected.
    """

    def __init__(
        self, urls: Sequence[str], node: NodeId, run: str, key: bytes, times: StreamTimes
    ) -> None:
        self.term = 0
        self.addresses: tuple[str, ...] = ()
        self._urls = [_checked_url(url) for url in urls]
        self._node = node
        self._run = run
        self._key = key
        self._times = times
        self._latest = self._urls[0]
        self._avoided: str | None = None

    async def dial(self, resume: Resume | None) -> Dialed:
        """Connect to the leader; NoScheduler states each scheduler's reason for rejection."""
        reasons = []
        tried: set[str] = set()
        likely = [url for url in (self._latest, *self._urls) if url != self._avoided]
        to_try = [*likely, *self._urls]
        while to_try:
            url = to_try.pop(0)
            if url in tried:
                continue
            tried.add(url)
            try:
                dialed = await self._connect(url, resume)
            except _Broken as error:
                reasons.append(f"{url}: {type(error).__name__} {error}")
                continue
            if isinstance(dialed, Dialed):
                self._latest, self._avoided = url, None
                return dialed
            reasons.append(f"{url}: {dialed.reason}")
            if dialed.leader is not None and len(tried) <= len(self._urls):
                with suppress(BadSetting):
                    leader = _checked_url(dialed.leader)
                    to_try.insert(0 if leader != self._avoided else len(to_try), leader)
        raise NoScheduler("; ".join(reasons))

    def avoid(self, url: str) -> None:
        """Try this URL last from now on, because its scheduler was silent."""
        self._avoided = url

    async def find_newer_leader(self, current: str) -> bool:
        """Look for a leader with a higher term than `current`'s; if found, dial it first."""
        for url in self._urls:
            if url == current:
                continue
            with suppress(*_Broken):
                async with time_limit(self._times.greeting_s):
                    term = await self._term_at(url)
                if term > self.term:
                    self.term = term
                    self._latest = url
                    return True
        return False

    def has_others(self, url: str) -> bool:
        return any(other != url for other in self._urls)

    # -- greeting -------------------------------------------------------------------------------

    async def _connect(self, url: str, resume: Resume | None) -> Dialed | TurnedAway:
        async with time_limit(self._times.greeting_s):
            line = await self._open(url)
            try:
                answer = await self._greet(line, url, resume)
            except BaseException:
                line.abort()
                raise
        if isinstance(answer, TurnedAway):
            await line.flush()
        return answer

    async def _greet(self, line: FrameLine, url: str, resume: Resume | None) -> Dialed | TurnedAway:
        challenge = self._checked(read_greeting(await line.receive()))
        if isinstance(challenge, TurnedAway):
            return challenge
        line.max_frame_bytes = MAX_MESSAGE_BYTES  # messages may come right behind the Welcome
        nonce = secrets.token_hex(16)
        hello = Hello(VERSION, self._node, self._run, nonce, self.term, resume, self.addresses)
        line.send(pack(proven(hello, self._key, challenge.nonce)))
        welcome = read_greeting(await line.receive())
        if isinstance(welcome, TurnedAway):
            return welcome
        if not isinstance(welcome, Welcome) or not is_proven(welcome, self._key, self._node, nonce):
            raise BadValue("it does not know the cluster's secret")
        if challenge.term < self.term:
            raise BadValue(f"it leads in term {challenge.term}, but term {self.term} has begun")
        self.term = challenge.term
        return Dialed(line, challenge.run, welcome, url)

    async def _term_at(self, url: str) -> int:
        """Return the term in which a scheduler leads; 0 if it does not lead."""
        line = await self._open(url)
        try:
            challenge = self._checked(read_greeting(await line.receive()))
        finally:
            line.abort()
        return challenge.term if isinstance(challenge, Challenge) else 0

    def _checked(self, greeting: Greeting) -> Challenge | TurnedAway:
        if isinstance(greeting, TurnedAway):
            return greeting
        if not isinstance(greeting, Challenge):
            raise BadValue("it sent no Challenge")
        if greeting.version != VERSION:
            raise BadValue(other_version(greeting.version, "the scheduler", "this GPU manager"))
        if not is_proven(greeting, self._key, self._node):
            raise BadValue("it does not know the cluster's secret")
        return greeting

    async def _open(self, url: str) -> FrameLine:
        return await dial(url, stream_path(self._node), {}, MAX_GREETING_BYTES)


def _checked_url(url: str) -> str:
    """Return a configured URL as it is dialed; raise BadSetting if it is invalid."""
    wanted = "http://host:port or https://host:port is expected"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        valid = parts.scheme in _SCHEMES and bool(parts.hostname) and (parts.port or True)
    except ValueError as error:
        raise BadSetting("scheduler", url, wanted) from error
    if not valid or parts.query or parts.fragment:
        raise BadSetting("scheduler", url, wanted)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


@dataclass(eq=False)
class LeaderStream:
    """Sends and receives every message once and in order, over successive lines.

    A scheduler without state of this node is first sent the models, in `model_pages`; a page is
    sent once half of the one before it is acknowledged: no number of models is too much. Then
    `send_whole_state` is called, with the releases and cancellations that the earlier scheduler may
    not have received; what was too much for it follows in `later_pages`.
    """

    dialer: Dialer
    times: StreamTimes
    model_pages: Callable[[], Iterator[list[Report]]]
    send_whole_state: Callable[[list[Report]], None]
    later_pages: Callable[[], Iterator[list[Report]]]
    receive: Callable[[Given | Answer | Contended], None]  # gets every message

    def __post_init__(self) -> None:
        self.begun = asyncio.Event()
        self.introduced = False
        self._channel: UpChannel | None = None
        self._paging: asyncio.Task[None] | None = None
        self._acknowledged = asyncio.Event()
        self._unsent: list[Report] = []
        self._run = ""
        self._line: FrameLine | None = None
        self._task: asyncio.Task[None] | None = None
        self._leaving = False
        self._received_s = 0.0

    @property
    def connected(self) -> bool:
        return self._line is not None

    def start(self) -> None:
        """Connect, and reconnect after every break."""
        self._task = asyncio.get_running_loop().create_task(self._keep_connected())
        self._task.add_done_callback(_ended)

    def send(self, message: Up) -> None:
        """Send a message now or when the stream resumes.

        Before a stream begins, only releases and cancellations are kept.
        """
        if self._channel is None or not self.introduced:
            self._keep([message])
            return
        self._send_over(self._channel, message)
        if self._channel.overfull:
            log.warning("too many reports are queued: the next stream sends the whole state")
            self.restart()

    def restart(self) -> None:
        """Close the stream without resuming it: the next stream begins with the whole state."""
        if self._channel is not None:
            self._keep(self._channel.unacknowledged())
        self._channel = None
        self.introduced = False
        paging, self._paging = self._paging, None
        if paging is not None:
            paging.cancel()
        if self._line is not None:
            self._line.abort()

    def leave(self) -> None:
        """Send Leave; no other stream follows this one."""
        self._leaving = True
        self.send(Leave())

    async def close(self) -> None:
        with suppress(TimeoutError):
            async with time_limit(self.times.leave_s):
                while self._line is not None and self._channel is not None:
                    if not self._channel.unacknowledged_count:
                        break
                    await asyncio.sleep(_POLL_S)
        for task in (self._task, self._paging):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    # -- connecting -----------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        retry_s, said = _RETRY_S, ""
        while not self._leaving:
            try:
                dialed = await self.dialer.dial(self._resume())
            except NoScheduler as error:
                level = logging.DEBUG if str(error) == said else logging.WARNING
                log.log(level, "no scheduler accepts this node: %s", error)
                said = str(error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, self.times.most_retry_s)
                continue
            retry_s, said = _RETRY_S, ""
            await self._exchange(dialed)
            await asyncio.sleep(retry_s)

    def _resume(self) -> Resume | None:
        return None if self._channel is None else Resume(self._run, self._channel.seen)

    async def _exchange(self, dialed: Dialed) -> None:
        loop = asyncio.get_running_loop()
        self._received_s = loop.time()
        helpers = []
        try:
            async with dialed.line as line:
                self._connected(line, dialed)
                if self.dialer.has_others(dialed.url):
                    helpers.append(loop.create_task(self._watch_leadership(line, dialed.url)))
                async with time_limit(self.times.silence_s) as timeout:
                    helpers.append(loop.create_task(self._beat(timeout)))
                    await line.pump(self._take)
        except (BadValue, GpuManagerError) as error:
            log.error("restarting the stream to the scheduler at %s: %s", dialed.url, error)
            self.restart()
        except TimeoutError:
            log.warning("the scheduler at %s is silent", dialed.url)
            self.dialer.avoid(dialed.url)
        except (OSError, LineBroken) as error:
            level = logging.DEBUG if self._leaving else logging.WARNING
            log.log(level, "the stream to %s broke: %s", dialed.url, error)
        finally:
            self._line = None
            for helper in helpers:
                helper.cancel()
            # Who waits is said again on the next line; until then nobody gets a GPU of this node.
            self.receive(Contended(waiting=False))

    def _connected(self, line: FrameLine, dialed: Dialed) -> None:
        channel = self._channel if dialed.welcome.resumed else None
        log.info("the stream to %s %s", dialed.url, "begins" if channel is None else "resumes")
        if channel is None:
            self.restart()
            self._line, self._channel, self._run = line, UpChannel(), dialed.run
            self._page(self._introduce(self._channel))
        else:
            self._line = line
            for data in channel.kept_after(dialed.welcome.seen):
                line.send(data)

    def send_later_pages(self) -> None:
        """Send the later pages, where they are not on their way already."""
        on_its_way = self._paging is not None and not self._paging.done()
        if self._channel is not None and self.introduced and not on_its_way:
            self._page(self._send_pages(self._channel, self.later_pages()))

    def _page(self, work: Coroutine[None, None, None]) -> None:
        self._paging = asyncio.get_running_loop().create_task(work)
        self._paging.add_done_callback(_ended)

    async def _introduce(self, channel: UpChannel) -> None:
        """Send the whole state, also where it takes more than one line."""
        await self._send_pages(channel, self.model_pages())
        self.introduced = True
        unsent, self._unsent = self._unsent, []
        try:
            self.send_whole_state(unsent)
        except (BadValue, GpuManagerError) as error:
            log.error("restarting the stream to the scheduler: %s", error)
            self.restart()
            return
        if self._leaving:
            self.send(Leave())
        self.begun.set()
        await self._send_pages(channel, self.later_pages())

    async def _send_pages(self, channel: UpChannel, pages: Iterator[list[Report]]) -> None:
        for page in pages:
            if self._leaving and self.introduced:
                return  # no message follows Leave
            for report in page:
                self._send_over(channel, report)
            while channel.unacknowledged_count > ACKNOWLEDGED_AT_ONCE:
                self._acknowledged.clear()
                await self._acknowledged.wait()

    def _send_over(self, channel: UpChannel, message: Up) -> None:
        data = channel.pack(message)
        if self._line is not None:
            self._line.send(data)

    def _keep(self, messages: Iterable[Up]) -> None:
        """Keep the unsent reports that the next stream must send: releases and cancellations."""
        reports = [found for found in messages if isinstance(found, Report)]
        self._unsent += [found for found in reports if isinstance(found.event, _OneTimeEvent)]
        del self._unsent[:-_MOST_UNSENT]

    async def _beat(self, timeout: asyncio.Timeout) -> None:
        while True:
            await asyncio.sleep(self.times.beat_s)
            timeout.reschedule(self._received_s + self.times.silence_s)
            if self._line is not None and self._channel is not None:
                self._line.send(self._channel.pack_hint(Beat()))

    async def _watch_leadership(self, line: FrameLine, url: str) -> None:
        """Leave a leader when another was elected, which a leader without its store may miss."""
        while True:
            await asyncio.sleep(self.times.probe_s)
            if await self.dialer.find_newer_leader(url):
                log.warning("%s no longer leads: term %d has begun", url, self.dialer.term)
                if self._channel is not None:
                    line.send(self._channel.pack_hint(Superseded(self.dialer.term)))
                    await asyncio.sleep(_POLL_S)
                line.abort()
                return

    def _take(self, frame: bytes) -> None:
        channel = self._channel
        if channel is None:
            return  # the stream was restarted, and the line is closing
        message = channel.unpack(frame)
        self._received_s = asyncio.get_running_loop().time()
        if isinstance(message, Given):
            self._check(message.term)
        if message is not None and not isinstance(message, Beat):
            self.receive(message)
        self._acknowledged.set()

    def _check(self, term: int) -> None:
        """Raise BadValue for an order of a leader that another leader has succeeded."""
        if term < self.dialer.term:
            raise BadValue(f"an order of term {term}, but term {self.dialer.term} has begun")
        self.dialer.term = term


def _ended(task: asyncio.Task[None]) -> None:
    """Log the error that ended the stream's task: the node is not attached without it."""
    if (error := error_of(task)) is not None:
        log.critical("this node is no longer attached", exc_info=error)
