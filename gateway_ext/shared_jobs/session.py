"""While there is a connection: records are followed, heartbeats sent, other gateways known."""

import asyncio
import fcntl
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from common.tasks import until_first
from gateway_ext.errors import QueueFailed
from gateway_ext.shared_jobs.index import JobIndex
from gateway_ext.shared_jobs.records import decode
from gateway_ext.shared_jobs.requests import NatsRequests, StreamMessage, StreamWatch
from gateway_ext.shared_jobs.settings import JetStreamSettings
from gateway_ext.shared_jobs.streams import StreamNames, ensure

_FORGET_S = 24 * 3600.0


class _Heartbeat(msgspec.Struct):
    session: str


_HEARTBEAT = msgspec.json.Decoder(_Heartbeat)


@dataclass(slots=True)
class _Gateway:
    seq: int
    session: str
    received_s: float
    written_s: float  # by the servers' clock


@dataclass(slots=True)
class GatewayPresence:
    """The sessions of gateways; `now_s` is a monotonic clock.

    A session is dead once it closed, once its gateway has a later session, or after `lease_s`
    without a heartbeat while this gateway was connected.
    """

    lease_s: float
    now_s: Callable[[], float]
    _gateways: dict[str, _Gateway] = field(default_factory=dict)
    _servers_s: float = 0.0
    _lost: set[str] = field(default_factory=set)

    def lives(self, session: str) -> bool:
        gateway = self._gateways.get(gateway_of(session))
        if gateway is None or gateway.session != session:
            return False
        return self.now_s() - gateway.received_s <= self.lease_s

    def receive(self, gateway: str, seq: int, content: bytes, written_s: float) -> None:
        """Note a heartbeat, which names the gateway's session; an empty session means closed."""
        try:
            session = _HEARTBEAT.decode(content).session
        except RecursionError as error:
            raise ValueError("no heartbeat of a gateway") from error
        self._gateways[gateway] = _Gateway(seq, session, self.now_s(), written_s)
        self._servers_s = max(self._servers_s, written_s)
        self._lost.discard(session)

    def session_of(self, gateway: str) -> str:
        """The current session of a gateway; "" where it has none."""
        entry = self._gateways.get(gateway)
        return entry.session if entry is not None else ""

    def restart_leases(self) -> None:
        """Start all leases again, as heartbeats could not arrive without a connection."""
        for gateway in self._gateways.values():
            gateway.received_s = self.now_s()

    def newly_dead(self, sessions: list[str]) -> list[str]:
        """The dead ones of these sessions that the previous call did not return."""
        dead = [
            session for session in sessions if session not in self._lost and not self.lives(session)
        ]
        self._lost |= set(dead)
        self._lost &= set(sessions)
        return dead

    def old(self) -> list[tuple[str, int]]:
        """Gateways without a heartbeat for a day, each with the number of its message."""
        before_s = self._servers_s - _FORGET_S
        return [
            (name, gateway.seq)
            for name, gateway in self._gateways.items()
            if gateway.written_s < before_s
        ]

    def forget(self, gateway: str) -> None:
        """Drop a gateway whose message was removed from the stream."""
        self._gateways.pop(gateway, None)


class GatewayIdentity:
    """The name of this gateway, kept in its state folder, which is locked against other processes.

    `session` is new at each start, so that claims of the session before are released at once.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._file = os.open(folder / "gateway", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise QueueFailed(f"the job queue has no folder: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.gateway = os.pread(self._file, 64, 0).decode("ascii")
            if not self.gateway.isalnum():
                self.gateway = uuid4().hex
                os.pwrite(self._file, self.gateway.encode(), 0)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise QueueFailed(f"another gateway has the folder {folder}: {error}") from error
        self.session = f"{self.gateway}.{uuid4().hex[:12]}"

    def close(self) -> None:
        """Unlock the folder for another process."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def beat(session: str) -> bytes:
    """The content of a heartbeat; an empty session announces that the gateway closes."""
    return msgspec.json.encode(_Heartbeat(session))


def gateway_of(session: str) -> str:
    return session.partition(".")[0]


@dataclass(slots=True)
class GatewaySession:
    """Keeps the index and the presence of gateways equal to the stream."""

    settings: JetStreamSettings
    names: StreamNames
    identity: GatewayIdentity
    presence: GatewayPresence
    index: JobIndex
    log: Logger
    _created: str = ""  # when the stream was, as the servers say
    _began: int = 0  # the first heartbeat of this connection

    async def serve(
        self,
        wire: NatsRequests,
        usable: Callable[[], None],
        clean_up: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Read the stream, then follow it, send heartbeats and clean up, until one fails."""
        tally = self.index.tally
        created, parts_bytes = await ensure(
            wire, self.names, self.settings.replicas, tally.capacity_bytes
        )
        tally.limit_to(parts_bytes)
        if created != self._created:
            self.index.clear()
            self._created = created
        self._began = await self._beat(wire)
        self.index.begin_reading()
        watch = StreamWatch(wire, self.names.jobs, self._receive)
        await watch.begin(until=self._began)
        self.index.end_reading()
        self.presence.restart_leases()
        usable()
        await until_first(watch.go_on(), self._keep_beating(wire), clean_up())

    async def _keep_beating(self, wire: NatsRequests) -> None:
        while True:
            await asyncio.sleep(self.settings.beat_s)
            await self._beat(wire)
            others = [
                session for session in self.index.claimers() if session != self.identity.session
            ]
            for session in self.presence.newly_dead(others):
                count = self.index.release_claims(session)
                self.log.warning("gateway %s is dead: its %d claims are released", session, count)

    async def _beat(self, wire: NatsRequests) -> int:
        subject = self.names.gateway(self.identity.gateway)
        return await wire.publish(subject, beat(self.identity.session))

    def _receive(self, message: StreamMessage) -> None:
        self.index.passed(message.seq)
        kind, name = message.subject.rsplit(".", 2)[-2:]
        try:
            if kind == "gateway":
                self.presence.receive(name, message.seq, message.content, message.written_s)
                self._check_single_session(name, message.seq)
            else:
                self.index.unread.add(message.subject)
                self.index.apply(message.subject, message.seq, decode(message.content))
                self.index.unread.discard(message.subject)
        except ValueError as error:
            # The message of a later version or of another program stays untouched.
            self.log.error(
                "job queue: the message at %s cannot be read: %r", message.subject, error
            )

    def _check_single_session(self, gateway: str, seq: int) -> None:
        ours = gateway == self.identity.gateway and seq > self._began
        if ours and self.presence.session_of(gateway) not in {self.identity.session, ""}:
            self.log.error("another gateway has a copy of our state folder: calls are made twice")
