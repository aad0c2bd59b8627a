"""The stream to the leader: dialed, kept up, renewed where it breaks, and ended."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from common.line import LineBroken, MessageLine
from gpu_manager.attachment.dialed_socket import DialedSocket
from gpu_manager.attachment.leader_dialing import Dialed, Dialer
from gpu_manager.errors import GpuManagerError, NoScheduler
from scheduler.api import BadValue, LeaseReleased, RequestCancelled
from scheduler.wire.node_stream import (
    Answer,
    Beat,
    Contended,
    Given,
    Leave,
    Report,
    Resume,
    StreamTimes,
    Superseded,
    Up,
    UpChannel,
)

log = logging.getLogger(__name__)

_POLL_S = 0.01
_MOST_WISHES = 4096
# Events that are reported once and that no snapshot shows.
_Wish = LeaseReleased | RequestCancelled


class LeaderStream:
    """Says and hears everything once and in order, over as many sockets as that takes.

    `tell_everything` is called when a scheduler knows nothing of what was said before, with those
    wishes (releases and cancellations) that the earlier one may not have heard.
    """

    def __init__(
        self,
        dialer: Dialer,
        times: StreamTimes,
        tell_everything: Callable[[list[Report]], None],
        heard: Callable[[Given | Answer | Contended], None],
    ) -> None:
        self.begun = asyncio.Event()
        self._dialer = dialer
        self._times = times
        self._tell_everything = tell_everything
        self._heard = heard
        self._channel: UpChannel | None = None
        self._wishes: list[Report] = []
        self._run = ""
        self._line: MessageLine | None = None
        self._task: asyncio.Task[None] | None = None
        self._leaving = False
        self._heard_s = 0.0

    @property
    def connected(self) -> bool:
        """Whether a scheduler is reached at the moment."""
        return self._line is not None

    def start(self) -> None:
        """Dial from now on."""
        self._task = asyncio.get_running_loop().create_task(self._keep_up())
        self._task.add_done_callback(_ended)

    def say(self, message: Up) -> None:
        """Say this now or when the stream goes on; before one begins, only wishes are kept."""
        if self._channel is None:
            self._keep([message])
            return
        data = self._channel.pack(message)
        if self._line is not None:
            self._line.send(data)
        if self._channel.overfull:
            log.warning("too many reports wait to be sent: the next stream begins anew")
            self.begin_anew()

    def begin_anew(self) -> None:
        """Break off: the next stream carries the whole state, not what this one lacked."""
        if self._channel is not None:
            self._keep(self._channel.unacknowledged())
        self._channel = None
        if self._line is not None:
            self._line.abort()

    def leave(self) -> None:
        """Say that the node goes; no other stream follows this one."""
        self._leaving = True
        self.say(Leave())

    async def close(self) -> None:
        """Wait for a moment until the scheduler has heard everything, then hang up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._times.leave_s):
                while self._line is not None and self._channel is not None:
                    if self._channel.all_acknowledged:
                        break
                    await asyncio.sleep(_POLL_S)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # -- keeping up -----------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        """Dial, talk, and dial again, until the node leaves."""
        retry_s = self._times.retry_s
        while not self._leaving:
            try:
                dialed = await self._dialer.dial(self._resume())
            except NoScheduler as error:
                first = retry_s == self._times.retry_s
                level = logging.WARNING if first else logging.DEBUG
                log.log(level, "no scheduler lets this node in: %s", error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, self._times.most_retry_s)
                continue
            retry_s = self._times.retry_s
            await self._talk(dialed)
            await asyncio.sleep(retry_s)

    def _resume(self) -> Resume | None:
        return None if self._channel is None else Resume(self._run, self._channel.seen)

    async def _talk(self, dialed: Dialed) -> None:
        """Until this socket breaks."""
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        helpers = []
        try:
            async with MessageLine(DialedSocket(dialed.socket)) as line:
                self._connected(line, dialed)
                if self._dialer.others(dialed.url):
                    helpers.append(loop.create_task(self._look_around(line, dialed.url)))
                async with asyncio.timeout(self._times.silence_s) as patience:
                    helpers.append(loop.create_task(self._beat(patience)))
                    while True:
                        self._hear(await line.receive())
                        self._heard_s = loop.time()
        except (BadValue, GpuManagerError) as error:
            log.error("the scheduler at %s: %s; beginning anew", dialed.url, error)
            self.begin_anew()
        except TimeoutError:
            log.warning("the scheduler at %s is silent", dialed.url)
            self._dialer.avoid(dialed.url)
        except (OSError, LineBroken) as error:
            level = logging.DEBUG if self._leaving else logging.WARNING
            log.log(level, "the stream to %s broke: %s", dialed.url, error)
        finally:
            self._line = None
            for helper in helpers:
                helper.cancel()

    def _connected(self, line: MessageLine, dialed: Dialed) -> None:
        """Go on where the last stream broke, or send the whole state."""
        channel = self._channel if dialed.welcome.resumed else None
        log.info("the stream to %s %s", dialed.url, "begins" if channel is None else "goes on")
        if channel is None:
            self.begin_anew()
            self._line, self._channel, self._run = line, UpChannel(), dialed.run
            wishes, self._wishes = self._wishes, []
            self._tell_everything(wishes)
        else:
            self._line = line
            for data in channel.kept_after(dialed.welcome.seen):
                line.send(data)
        self.begun.set()

    def _keep(self, messages: Iterable[Up]) -> None:
        """The reports not sent on this stream that the next one must carry."""
        reports = [found for found in messages if isinstance(found, Report)]
        self._wishes += [found for found in reports if isinstance(found.event, _Wish)]
        del self._wishes[:-_MOST_WISHES]

    async def _beat(self, patience: asyncio.Timeout) -> None:
        while True:
            await asyncio.sleep(self._times.beat_s)
            patience.reschedule(self._heard_s + self._times.silence_s)
            if self._line is not None and self._channel is not None:
                self._line.send(self._channel.pack_hint(Beat()))

    async def _look_around(self, line: MessageLine, url: str) -> None:
        """A leader that is cut off from its store may not know that another one was elected."""
        while True:
            await asyncio.sleep(self._times.probe_s)
            if await self._dialer.overtaken(url):
                log.warning("%s leads no more: term %d has begun", url, self._dialer.term)
                if self._channel is not None:
                    line.send(self._channel.pack_hint(Superseded(self._dialer.term)))
                    await asyncio.sleep(_POLL_S)
                line.abort()
                return

    def _hear(self, data: bytes) -> None:
        if self._channel is None:
            return  # it was given up, and the line is closing
        for message in self._channel.unpack(data):
            if isinstance(message, Given):
                self._check(message.term)
            if not isinstance(message, Beat):
                self._heard(message)

    def _check(self, term: int) -> None:
        """Orders of a leader that was followed by another one are not obeyed."""
        if term < self._dialer.term:
            raise BadValue(f"an order of term {term}, and {self._dialer.term} has begun")
        self._dialer.term = term


def _ended(task: asyncio.Task[None]) -> None:
    """A bug of ours must not leave a node unattached without a word."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.critical("this node is attached no more", exc_info=error)
