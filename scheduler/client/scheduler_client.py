"""The client for other processes: finds the leader, and asks again after the leader has changed."""

import asyncio
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from functools import partial
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from cache_manager.model.ids import GpuId, ModelId, NodeId
from common.tcp import notice_silence
from common.telemetry.traces import TraceContext, headers_of
from scheduler.client.granted_lease import GrantedLease
from scheduler.client.presence import CALLER, Presence
from scheduler.client.waits import Waits
from scheduler.model.errors import (
    CallerNotAllowed,
    EventRefused,
    GivenBack,
    MalformedRequest,
    ModelsTooLarge,
    NoGpus,
    QueueFull,
    RequestExpired,
    RequestFailed,
    RequestWithdrawn,
    SchedulerError,
    SchedulerUnreachable,
)
from scheduler.model.values import Estimate, LeaseId, Placement, Request, RequestId, SlotId

# A scheduler that held a request for longer than connecting may take was the leader.
_HELD_S = 2.5
# A leader may die while an answered release still waits for its node's stream, at most this long.
_REPEATED_S = 12.0
_MOST_REPEATED = 4_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
# A host that is cut off or dead ends no connection: silence for this long ends it.
_SILENCE_S = 4
_OK, _DONE, _UNAUTHORIZED = 200, 204, 401
_NOT_LEADING = "not-leading"
LISTED = "listed"  # the key under which an answer that is a JSON list is returned

log = logging.getLogger(__name__)


class SchedulerClient:
    """Talks to any of several schedulers of a cluster, one of which leads; use as a context.

    A request whose leader goes away is sent again to the next leader, with its id and its time of
    arrival, until a leader answers or no scheduler has answered for `patience_s`. The next leader
    also receives the last releases again: the earlier leader may have died before it applied them.
    A leader that neither answers nor goes away is left once another one leads. The leases end with
    this process (`Presence`). All times of requests are those of `time.monotonic` in this process.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        *,
        patience_s: float = 30.0,
        connections: int = 0,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._at = self._urls[0]
        self._presence = Presence(lambda: self._at)
        self._headers = {"Authorization": f"Bearer {token}", CALLER: self._presence.caller}
        self._patience_s = patience_s
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._waits = Waits(self._urls, self._readiness, self._go_to)
        self._term = 0
        self._released: deque[tuple[float, Mapping[str, object]]] = deque(maxlen=_MOST_REPEATED)
        self._to_repeat: deque[Mapping[str, object]] = deque()
        self._repeated_some = False
        self._repeating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=self._connections, socket_factory=_socket)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._repeating is not None:
            self._repeating.cancel()
            await asyncio.wait({self._repeating})
        await self._waits.close()
        await self._presence.close()
        if self._session is not None:
            await self._session.close()

    async def acquire(self, request: Request, trace: TraceContext | None = None) -> GrantedLease:
        """Wait for a lease, for this trace; cancelling the task cancels the request.

        Raises RequestEnded if the request ends without a lease, NoGpus if there is no GPU, Refused
        if the request is invalid, Unreachable if no scheduler answers.
        """
        arrived_s = time.monotonic() if request.arrived_s is None else request.arrived_s

        def fields() -> Mapping[str, object]:
            return _fields(request, arrived_s, time.monotonic())

        assert self._session is not None, "use it as a context"
        await self._presence.begin(self._session, self._headers)
        return self._noted(await self._insist("/acquire", fields, request.id, trace))

    async def wanted(self, request: RequestId) -> GrantedLease:
        """Wait for another lease after one that was released with `may_return`."""
        return self._noted(await self._insist("/wanted", lambda: {"request": request}, request))

    async def release(self, lease: LeaseId, *, may_return: bool = False) -> None:
        """The holder no longer needs the GPU, or (with `may_return`) may need it again later."""
        self._presence.released(lease)
        fields = {"lease": lease, "may_return": may_return}
        await self._insist("/release", lambda: fields, RequestId(""))
        self._released.append((time.monotonic(), fields))

    async def cancel(self, request: RequestId) -> None:
        """End the request, wherever it is."""
        await self._insist("/cancel", lambda: {"request": request}, request)

    def _noted(self, answer: Mapping[str, Any]) -> GrantedLease:
        """The lease of an answer, which ends with this process from now on."""
        granted = _granted(answer)
        self._presence.acquired(granted.placement.lease)
        return granted

    # -- orders that need the administrator's token -----------------------------------------------

    async def pin(self, model: ModelId) -> None:
        """Keep the model wherever it is in GPU memory; Refused if no GPU holds it."""
        await self._order(model, "pin")

    async def unpin(self, model: ModelId) -> None:
        """Let the model be evicted again; Refused if no GPU holds it."""
        await self._order(model, "unpin")

    async def pinned(self) -> frozenset[ModelId]:
        """The models that are pinned on some GPU."""
        answer = await self._insist("/models", lambda: None, RequestId(""))
        return frozenset(
            ModelId(model["model"])
            for model in answer[LISTED]
            if any(holder["pinned"] for holder in model["holders"])
        )

    async def _order(self, model: ModelId, verb: str) -> None:
        await self._insist(f"/models/{quote(model)}/{verb}", dict, RequestId(""))

    # -- asking until there is an answer ----------------------------------------------------------

    async def _insist(
        self,
        path: str,
        fields: Callable[[], Mapping[str, object] | None],
        request: RequestId,
        trace: TraceContext | None = None,
    ) -> Mapping[str, Any]:
        """The leader's answer; an error that concerns the request itself is raised at once."""
        silent_since_s = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while True:
            at, asked_s = self._at, time.monotonic()
            try:
                status, answer = await self._waits.answer(at, self._ask(at, path, fields(), trace))
            except (aiohttp.ClientError, OSError, ValueError) as error:
                trouble = f"{at}: {error!r}"
                self._try_next(at)
            else:
                if status in {_OK, _DONE}:
                    self._answered(at, answer)
                    return answer
                if answer.get("error") != _NOT_LEADING:
                    raise error_of(status, answer, request)
                trouble = str(answer.get("message"))
                leader = answer.get("leader")
                if isinstance(leader, str):
                    pause_s = _FIRST_PAUSE_S if leader != at else pause_s
                    self._at = leader
                else:
                    self._try_next(at)
            self._repeat_releases()
            if time.monotonic() - asked_s > _HELD_S:  # a scheduler led until now
                silent_since_s = time.monotonic()
            if time.monotonic() - silent_since_s > self._patience_s:
                raise SchedulerUnreachable(f"no scheduler leads: {trouble}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _ask(
        self,
        at: str,
        path: str,
        fields: Mapping[str, object] | None,
        trace: TraceContext | None = None,
    ) -> tuple[int, Mapping[str, Any]]:
        """The status and answer of a POST of these fields, or of a GET if there are none."""
        if fields is None:
            status, body = await self._get(at + path)
        else:
            # A header, since unknown fields of the body are refused.
            headers = self._headers if trace is None else self._headers | headers_of(trace)
            status, body = await self._post(at + path, headers, fields)
        answer = {} if status == _DONE else json.loads(body)
        if isinstance(answer, list):
            answer = {LISTED: answer}
        if not isinstance(answer, dict):
            raise ValueError("the answer is no JSON object")
        return status, answer

    async def _post(
        self, url: str, headers: Mapping[str, str], fields: Mapping[str, object]
    ) -> tuple[int, bytes]:
        assert self._session is not None, "use it as a context"
        async with self._session.post(url, headers=headers, json=fields) as response:
            return response.status, await response.read()

    async def _get(self, url: str) -> tuple[int, bytes]:
        assert self._session is not None, "use it as a context"
        async with self._session.get(url, headers=self._headers) as response:
            return response.status, await response.read()

    async def _readiness(self, at: str) -> Mapping[str, Any]:
        """The readiness answer of a scheduler; empty where it does not answer."""
        try:
            _, answer = await self._ask(at, "/readyz", None)
        except (aiohttp.ClientError, OSError, ValueError):
            return {}
        return answer

    def _go_to(self, leader: str) -> None:
        self._at = leader

    # -- releases that may have died with the leader that took them -------------------------------

    def _answered(self, at: str, answer: Mapping[str, Any]) -> None:
        """Note a leader's answer; a leader of a new term receives the last releases again."""
        term = answer.get("term", 0)
        if term:
            self._waits.led(at, term)
        if term < self._term or not term:
            return
        self._repeated_some = False
        if term > self._term > 0:
            self._repeat_releases()
            self._repeated_some = False
        self._term = term

    def _repeat_releases(self) -> None:
        """Send the last releases to the next leader, once however many calls failed."""
        if self._repeated_some:
            return
        self._repeated_some = True
        since_s = time.monotonic() - _REPEATED_S
        self._to_repeat.extend(fields for at_s, fields in self._released if at_s >= since_s)
        if self._to_repeat and (self._repeating is None or self._repeating.done()):
            # In an empty context: the repetition belongs to no single call.
            self._repeating = asyncio.create_task(self._repeat(), context=Context())

    async def _repeat(self) -> None:
        while self._to_repeat:
            fields = self._to_repeat.popleft()
            try:
                await self._insist("/release", partial(dict, fields), RequestId(""))
            except SchedulerUnreachable as error:
                log.warning("could not repeat the last releases: %s", error)
                self._to_repeat.clear()
            except SchedulerError as error:
                log.info("could not release lease %s again: %s", fields["lease"], error)

    def _try_next(self, failed: str) -> None:
        """Move to the next configured scheduler if the failed one is still the current one.

        Several calls may report the same failure: only the first one changes the scheduler.
        """
        if self._at == failed:
            number = self._urls.index(failed) if failed in self._urls else -1
            self._at = self._urls[(number + 1) % len(self._urls)]


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that fails when the other host is silent; waiting for an answer is no silence."""
    family, kind, protocol, *_ = address
    found = socket.socket(family, kind, protocol)
    notice_silence(found, _SILENCE_S)
    return found


def _fields(request: Request, arrived_s: float, now_s: float) -> Mapping[str, object]:
    """The request as it is sent: times relative to now, fields at their defaults left out."""
    sent: dict[str, object] = {
        "request": request.id,
        "function": request.function,
        "models": request.models,
        "waited_s": max(0.0, now_s - arrived_s),
    }
    if request.deadline_s is not None:
        sent["deadline_in_s"] = max(0.0, request.deadline_s - now_s)
    optional = {
        "batch": (request.batch, 1),
        "priority": (request.priority, 0),
        "application": (request.application, ""),
        "stage": (request.stage, ""),
        "slo_s": (request.slo_s, None),
        "near": (request.near, None),
        "registered_only": (request.registered_only, False),
        "max_wait_s": (request.max_wait_s, None),
    }
    sent.update({name: value for name, (value, usual) in optional.items() if value != usual})
    return sent


def _granted(answer: Mapping[str, Any]) -> GrantedLease:
    estimate = answer["estimate"]
    placement = Placement(
        lease=LeaseId(answer["lease"]),
        gpu=GpuId(answer["gpu"]),
        node=NodeId(answer["node"]),
        slot=SlotId(answer["slot"]),
        models=tuple(ModelId(model) for model in answer["models"]),
        hit=answer["hit"],
        estimate=Estimate(estimate["load_s"], estimate["run_s"]),
    )
    return GrantedLease(placement, answer["term"], tuple(answer["addresses"]), answer["token"])


_PLAIN: Mapping[str, type[RequestWithdrawn | RequestFailed | GivenBack]] = {
    "cancelled": RequestWithdrawn,
    "failed": RequestFailed,
    "given-back": GivenBack,
}


def error_of(status: int, answer: Mapping[str, Any], request: RequestId) -> SchedulerError:
    """The error that the service raised, as its answer names it."""
    code, message = answer.get("error"), str(answer.get("message", f"status {status}"))
    reason = message.removeprefix(f"request {request}: ")
    if code == "queue-full":
        return QueueFull(request, reason, answer.get("waiting", 0), answer.get("wait_s", 0.0))
    if code == "too-large":
        needed_bytes, largest_bytes = answer.get("needed_bytes", 0), answer.get("largest_bytes", 0)
        return ModelsTooLarge(request, reason, needed_bytes, largest_bytes)
    if code == "expired":
        return RequestExpired(request, reason, None)
    if code == "no-gpus":
        return NoGpus()
    if code == "not-allowed":
        return CallerNotAllowed(message, known=status != _UNAUTHORIZED)
    if code == "bad-request":
        return MalformedRequest(message)
    plain = _PLAIN.get(str(code))
    return EventRefused(None, message) if plain is None else plain(request, reason)
