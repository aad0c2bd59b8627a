"""The workers of one gateway: calls and callbacks, each with places of their own."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import Logger
from random import Random
from typing import Self

import aiohttp

from gateway_ext.jobs.addresses import callback_lane
from gateway_ext.jobs.callbacks import Callbacks, callback_session
from gateway_ext.jobs.caller import Caller
from gateway_ext.jobs.calls import Calls
from gateway_ext.jobs.dispatcher import Dispatcher
from gateway_ext.jobs.fairness import Limits
from gateway_ext.jobs.model import Kind, call_lane
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.retry import Patience
from gateway_ext.model import FunctionId
from gateway_ext.tracing.tracer import Tracer

_CALLS = Limits()
_CALLBACKS = Limits(overall=32, per_lane=4)
_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How many jobs run at once, how often they are tried, and where callbacks may go."""

    calls: Limits = _CALLS
    callbacks: Limits = _CALLBACKS
    patience: Patience = _PATIENCE
    callback_patience: Patience = _PATIENCE
    callback_timeout_s: float = 30.0
    callback_private: bool = True


class Worker:
    """Makes the calls of a queue until it is closed; what runs then waits in the queue again."""

    def __init__(
        self,
        queue: JobQueue,
        calls: Calls,
        attempts_of: Callable[[FunctionId], int | None],
        settings: WorkerSettings,
        log: Logger,
        tracer: Tracer | None = None,
    ) -> None:
        """`attempts_of` says what a function wishes for, None where it does not say."""
        self._tracer = tracer
        self._queue = queue
        self._calls = calls
        self._attempts_of = attempts_of
        self._settings = settings
        self._log = log
        self._session: aiohttp.ClientSession | None = None
        self._dispatchers: list[Dispatcher] = []

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Begin with what waits."""
        settings, chance = self._settings, Random()
        self._session = callback_session(
            private=settings.callback_private, timeout_s=settings.callback_timeout_s
        )
        caller = Caller(self._calls, self._queue, self._patience_of, time.time, chance)
        patience = settings.callback_patience
        sender = Callbacks(self._session, patience, time.time, chance, self._tracer)
        self._dispatchers = [
            Dispatcher(
                *(self._queue, Kind.CALL, settings.calls, caller.handle),
                lane_of=lambda job: call_lane(job.call.function),
                now_s=time.time,
                log=self._log,
            ),
            Dispatcher(
                *(self._queue, Kind.CALLBACK, settings.callbacks, sender.handle),
                lane_of=lambda job: callback_lane(job.call.callback_url),
                now_s=time.time,
                log=self._log,
            ),
        ]
        for dispatcher in self._dispatchers:
            dispatcher.start()

    def endings(self) -> Mapping[tuple[Kind, str], int]:
        """How often a call, or a callback, ended how."""
        return {
            (dispatcher.kind, ending): count
            for dispatcher in self._dispatchers
            for ending, count in dispatcher.endings.items()
        }

    async def close(self) -> None:
        """Break off what runs, and let it wait again."""
        for dispatcher in self._dispatchers:
            await dispatcher.close()
        if self._session is not None:
            await self._session.close()

    @property
    def running(self) -> int:
        """How many calls and callbacks are under way."""
        return sum(dispatcher.running for dispatcher in self._dispatchers)

    def _patience_of(self, function: FunctionId) -> Patience:
        return self._settings.patience.of(self._attempts_of(function))
