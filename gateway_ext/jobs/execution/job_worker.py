"""Runs the jobs of one gateway: calls and callbacks, each with a concurrency of their own."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging import Logger
from random import Random
from typing import Self

import aiohttp

from gateway_ext.jobs.execution.callback_sender import CallbackSender, callback_session
from gateway_ext.jobs.execution.function_calls import FunctionCalls
from gateway_ext.jobs.execution.job_caller import JobCaller
from gateway_ext.jobs.execution.job_dispatcher import JobDispatcher
from gateway_ext.jobs.execution.lane_fairness import LaneLimits
from gateway_ext.jobs.execution.retry_policy import RetryPolicy
from gateway_ext.jobs.intake.callback_addresses import CallbackRule
from gateway_ext.jobs.queue.job_queue import JobQueue
from gateway_ext.jobs.queue.job_values import JobKind
from gateway_ext.model import FunctionId
from gateway_ext.tracing.call_tracer import CallTracer

_CALLS = LaneLimits()
_CALLBACKS = LaneLimits(overall=32, per_lane=4)
_PATIENCE = RetryPolicy()


@dataclass(frozen=True, slots=True)
class JobWorkerSettings:
    """Concurrency, retry policies, and which callback addresses are permitted.

    A receiver has `callback_s` for its answer. `defect_s` is the wait after an attempt that met a
    defect of the gateway.
    """

    calls: LaneLimits = _CALLS
    callbacks: LaneLimits = _CALLBACKS
    patience: RetryPolicy = _PATIENCE
    callback_patience: RetryPolicy = _PATIENCE
    callback_s: float = 30.0
    callback_rule: CallbackRule = field(default_factory=CallbackRule)
    defect_s: float = 30.0


class JobWorker:
    """Runs the jobs of a queue until it is closed; jobs under way then go back to the queue."""

    def __init__(
        self,
        queue: JobQueue,
        calls: FunctionCalls,
        attempts_of: Callable[[FunctionId], int | None],
        settings: JobWorkerSettings,
        log: Logger,
        tracer: CallTracer | None = None,
    ) -> None:
        """`attempts_of` gives the attempts in a function's options; None for the default."""
        self._tracer = tracer
        self._queue = queue
        self._calls = calls
        self._attempts_of = attempts_of
        self._settings = settings
        self._log = log
        self._session: aiohttp.ClientSession | None = None
        self._dispatchers: list[JobDispatcher] = []

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Start running jobs."""
        settings, chance, rule = self._settings, Random(), self._settings.callback_rule
        now_s = self._queue.now_s
        self._session = callback_session(rule)
        caller = JobCaller(self._calls, self._queue, self._policy_of, now_s, chance)
        patience = settings.callback_patience
        answer_s = settings.callback_s
        sender = CallbackSender(
            self._session, rule, patience, answer_s, now_s, chance, self._tracer
        )
        self._dispatchers = [
            JobDispatcher(
                *(self._queue, JobKind.CALL, settings.calls, caller.handle),
                now_s=now_s,
                log=self._log,
                defect_s=settings.defect_s,
            ),
            JobDispatcher(
                *(self._queue, JobKind.CALLBACK, settings.callbacks, sender.handle),
                now_s=now_s,
                log=self._log,
                defect_s=settings.defect_s,
            ),
        ]
        for dispatcher in self._dispatchers:
            dispatcher.start()

    def endings(self) -> Mapping[tuple[JobKind, str], int]:
        """The number of attempts by kind and outcome."""
        return {
            (dispatcher.kind, ending): count
            for dispatcher in self._dispatchers
            for ending, count in dispatcher.endings.items()
        }

    async def close(self) -> None:
        """Cancel running jobs and return them to the queue."""
        await asyncio.gather(*(dispatcher.close() for dispatcher in self._dispatchers))
        if self._session is not None:
            await self._session.close()

    @property
    def running(self) -> int:
        """The number of calls and callbacks under way."""
        return sum(dispatcher.running for dispatcher in self._dispatchers)

    def _policy_of(self, function: FunctionId) -> RetryPolicy:
        return self._settings.patience.of(self._attempts_of(function))
