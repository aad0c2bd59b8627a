"""One connection to etcd: its calls with time limits, its errors as StoreErrors, its replacement.

Of aetcd only the generated calls are used, not its client: that client supports one host and no
TLS, waits for ever by default, and loses watches without an error (docs/etcd.md lists its faults).
A gRPC channel has traps of its own:

- It shares its connections with every channel to the same address, so that a new channel would
  reuse the dead connection of the old one; hence the local pool.
- It waits up to two minutes before it connects again; hence the short back-off.
- Closing it cancels the tasks that wait for an answer; hence an old channel is closed only when no
  call can be left on it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc  # type: ignore[import-untyped]  # ships no types
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types

from common.tasks import BackgroundTasks
from scheduler.model.errors import DatastoreError, LeaseGone, StoreUnavailable

CALL_S = 2.0
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),  # the default of 4 MB is too little for a long listing
    ("grpc.enable_http_proxy", 0),
)
# Status codes for which etcd, or the way to it, is at fault; for any other the caller is at fault.
_AWAY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNKNOWN,
    }
)
# Longer than any call's time limit, so that no call is left on a channel when it is closed.
_DRAIN_S = CALL_S + 1.0


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Where etcd is, and how to authenticate; all keys are under `prefix`."""

    endpoints: tuple[str, ...] = ("http://127.0.0.1:2379",)
    prefix: str = "/gpufaas/"
    user: str = ""
    password: str = ""
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class PassExpired(StoreUnavailable):
    """The auth token has expired; the call can be repeated with a new one."""


class EtcdStubs:
    """The calls of etcd on one channel."""

    def __init__(self, channel: Any, target: str) -> None:
        self.channel = channel
        self.target = target
        self.kv = rpc.KVStub(channel)
        self.lease = rpc.LeaseStub(channel)
        self.watch = rpc.WatchStub(channel)
        self.auth = rpc.AuthStub(channel)
        self.metadata: tuple[tuple[str, str], ...] = ()


class EtcdChannel:
    """Calls to whichever endpoint answers; `reopen` moves on to the next endpoint."""

    def __init__(self, settings: EtcdSettings, log: Logger) -> None:
        self._settings = settings
        self._log = log
        self._next = 0
        self._closing = BackgroundTasks(log, "closing an old connection to etcd")
        self._entry = asyncio.Lock()
        self._pem: tuple[bytes | None, ...] | None = None
        self.calls = self._connect()

    def reopen(self) -> None:
        """Connect to the next endpoint; calls under way end on the old connection."""
        old, self.calls = self.calls, self._connect()
        self._closing.start(_close_later(old.channel))

    async def call(self, stub: str, method: str, request: Any, timeout_s: float = CALL_S) -> Any:
        try:
            return await self._ask(stub, method, request, timeout_s)
        except PassExpired:
            return await self._ask(stub, method, request, timeout_s)

    async def _ask(self, stub: str, method: str, request: Any, timeout_s: float) -> Any:
        calls = self.calls
        await self.enter(calls)
        with explained(calls):
            return await getattr(getattr(calls, stub), method)(
                request, timeout=timeout_s, metadata=calls.metadata
            )

    async def enter(self, calls: EtcdStubs) -> None:
        """Fetch an auth token first, if a user is configured."""
        if not self._settings.user or calls.metadata:
            return
        async with self._entry:
            if calls.metadata:
                return
            request = rpc.AuthenticateRequest(
                name=self._settings.user, password=self._settings.password
            )
            with explained(calls):
                answer = await calls.auth.Authenticate(request, timeout=CALL_S)
            calls.metadata = (("token", answer.token),)

    async def close(self) -> None:
        """Close all connections; calls that still wait raise StoreUnavailable."""
        await self._closing.close()
        await self.calls.channel.close()

    def _connect(self) -> EtcdStubs:
        endpoint = self._settings.endpoints[self._next % len(self._settings.endpoints)]
        self._next += 1
        url = urlsplit(endpoint if "//" in endpoint else f"http://{endpoint}")
        target = f"{url.hostname}:{url.port or 2379}"
        if url.scheme == "https":
            channel = grpc.aio.secure_channel(target, self._credentials(), options=_OPTIONS)
        else:
            channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        return EtcdStubs(channel, target)

    def _credentials(self) -> Any:
        """The certificates, read again for each connection since they are renewed."""
        paths = (self._settings.ca_file, self._settings.key_file, self._settings.cert_file)
        try:
            self._pem = tuple(None if path is None else path.read_bytes() for path in paths)
        except OSError as error:
            if self._pem is None:
                raise DatastoreError(f"{error.filename}: {error.strerror}") from error
            self._log.warning("keeping the old certificates for etcd: %s", error)
        return grpc.ssl_channel_credentials(*self._pem)


@contextmanager
def explained(calls: EtcdStubs) -> Iterator[None]:
    """Raise every failure of these calls as a StoreError."""
    try:
        yield
    except rpc.AioRpcError as error:
        if calls.metadata and _is_expired(error):
            calls.metadata = ()  # the next call fetches another token
            raise PassExpired(error.details()) from error
        raise _ours(error) from error
    except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        raise StoreUnavailable("the connection was closed") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise StoreUnavailable("the connection was closed") from None  # gRPC cancelled the task


def _is_expired(error: Any) -> bool:
    """Whether the token has expired, or users and roles have changed since it was issued."""
    old = "auth store is old" in (error.details() or "")
    return old or error.code() is grpc.StatusCode.UNAUTHENTICATED


def _ours(error: Any) -> DatastoreError:
    code, text = error.code(), error.details() or str(error.code())
    if code is grpc.StatusCode.NOT_FOUND and "lease" in text:
        return LeaseGone(0)
    if code in _AWAY:
        return StoreUnavailable(text)
    return DatastoreError(f"{code.name}: {text}")


async def _close_later(channel: Any) -> None:
    try:
        await asyncio.sleep(_DRAIN_S)
    finally:
        await channel.close()
