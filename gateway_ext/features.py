"""What a feature of the gateway builds upon, and where it plugs in."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from logging import Logger
from typing import Any

from common.http.asgi import App
from gateway_ext.calls.function_table import Functions
from gateway_ext.calls.invoke import Invoke
from gateway_ext.jobs.caller import FunctionCalls
from gateway_ext.jobs.intake import AsyncIntake
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.shared import SharedStore
from gateway_ext.metrics import GatewayMeters
from gateway_ext.settings import GatewaySettings
from scheduler.client.operator_client import OperatorClient

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Hooks:
    """The parts of a gateway; a feature fills in below what it adds when it starts."""

    settings: GatewaySettings
    functions: Functions
    invoke: Invoke
    meters: GatewayMeters
    queue: JobQueue
    intake: partial[AsyncIntake]  # takes async calls of something
    shared: SharedStore | None
    console: OperatorClient | None  # has an administrator's token
    every_s: float
    log: Logger

    # Paths by their first part, for everybody and for administrators, and those below /system.
    routes: dict[str, App] = field(default_factory=dict)
    pages: dict[str, App] = field(default_factory=dict)
    below_system: dict[str, App] = field(default_factory=dict)
    # What jobs call beside functions, by the word before the colon in the name of their target.
    job_calls: dict[str, FunctionCalls] = field(default_factory=dict)
    namespace_removed: list[Callable[[str], Awaitable[None]]] = field(default_factory=list)
    # What the gateway's page shows of a feature: sections by their names, and alerts.
    sections: dict[str, Callable[[], Rows]] = field(default_factory=dict)
    alerts: list[Callable[[], Iterable[Mapping[str, str]]]] = field(default_factory=list)
    # Called when the gateway stops: they end responses that would never end by themselves.
    ends: list[Callable[[], None]] = field(default_factory=list)

    async def remove_namespace(self, namespace: str) -> None:
        """Remove what features keep of a namespace."""
        for removed in self.namespace_removed:
            await removed(namespace)


Feature = Callable[[Hooks], AbstractAsyncContextManager[object]]
