"""Finds the scheduler that leads, connects to it and authenticates."""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from common.errors import StreamRefused
from common.frame_line import FrameLine, LineBroken
from common.stream_upgrade import dial
from common.time_limits import time_limit
from gpu_manager.errors import BadSetting, NoScheduler
from scheduler.api import BadValue, NodeId
from scheduler.wire.codec import VERSION, other_version
from scheduler.wire.node_stream import (
    MAX_GREETING_BYTES,
    MAX_MESSAGE_BYTES,
    Challenge,
    Greeting,
    Hello,
    Resume,
    StreamTimes,
    TurnedAway,
    Welcome,
    is_proven,
    pack_greeting,
    proven,
    read_greeting,
    stream_path,
)

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
        """Whether there are schedulers besides the one at this URL."""
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
        line.send(pack_greeting(proven(hello, self._key, challenge.nonce)))
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
