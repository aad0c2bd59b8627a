"""A gateway of a simulation: calls, leases, async jobs and workflows, behind its server."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import cast

from common.http.client import HttpClient
from common.http.server import serving
from gateway_ext.calls.exchange import InvokeSettings
from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.calls.invoke import Invoke
from gateway_ext.calls.lease_pool import LeasePool
from gateway_ext.errors import QueueFailed
from gateway_ext.features import Hooks
from gateway_ext.gateway import FEATURES, STORES, GatewayApp
from gateway_ext.jobs.callbacks import CallbackRule
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.routes import make_job_routes
from gateway_ext.jobs.shared import TextCopy, TextKey, shared_store
from gateway_ext.jobs.worker import job_intake, jobs_of, opened_queue
from gateway_ext.metrics import ApiMeters, GatewayMeters
from gateway_ext.model import Deployment, Endpoint, FunctionId
from gateway_ext.openfaas import function_options
from gateway_ext.settings import GatewaySettings
from hunt.seeds.programs.function_program import TIMEOUT_S, FunctionProgram
from hunt.seeds.scenarios.fault_plan import NATS
from hunt.seeds.scenarios.planned_functions import TENANTS, PlannedFunction
from hunt.seeds.surroundings import SECRET, Surroundings
from scheduler.client.lease_client import LeaseClient
from scheduler.service.access import ApiRole, token
from tests.kit.simulation.job_disk import JobDisk
from tests.kit.simulation.simulated_nats import NATS_PORT
from tests.kit.simulation.simulated_network import listener

log = logging.getLogger("hunt.seeds.gateway")

PORT = 8080
WORKFLOW: TextKey = (TENANTS[0], "w")
WORKFLOW_PATH = f"workflow/w.{TENANTS[0]}"
_WORKFLOW_MS = 300_000
_DRAIN_S = 2.0
_START_AGAIN_S = 1.0


class GatewayProgram:
    """One gateway, through all its lives; `disk` outlives them, of which `jobs` is one's queue."""

    functions: Functions
    leases: LeaseClient
    pool: LeasePool
    jobs: JobQueue
    workflows: TextCopy | None  # the feature's table of them

    def __init__(self, around: Surroundings, name: str, instances: list[FunctionProgram]) -> None:
        self.name = name
        self.disk = JobDisk(around.chance)
        self.serves = False
        self._around = around
        self._instances = instances

    async def run(self) -> None:
        """Serve until cancelled, then end in order; without a queue it is started again."""
        while True:
            try:
                await self._serve()
            except QueueFailed as error:
                self._around.journal.note(f"{self.name} cannot start: {error}")
                await asyncio.sleep(_START_AGAIN_S)

    def died(self) -> None:
        """What is on its disk stays."""
        self.serves = False

    async def _serve(self) -> None:
        """As the gateway does it, without what people and faas-cli use."""
        shared = self._around.scenario.shared_queue
        settings = GatewaySettings(
            state_dir=str(self._around.folder / self.name),
            timeout_s=TIMEOUT_S,
            callback_allowed=("0.0.0.0/0", "::/0"),
            queue=f"nats://{NATS}:{NATS_PORT}" if shared else "sqlite",
        )
        options = partial(function_options.of, default_timeout_s=TIMEOUT_S)
        invocation = InvokeSettings()
        functions = self.functions = Functions(self._changed, options)
        meters = GatewayMeters(functions.loads)
        self.leases = LeaseClient(self._around.scheduler_urls, token(SECRET, ApiRole.CALLER))
        async with AsyncExitStack() as exits:
            await exits.enter_async_context(self.leases)
            pool = self.pool = LeasePool(self.leases, meters)
            client = HttpClient(invocation.client)
            invoke = Invoke(functions, client, pool, invocation, meters)
            exits.push_async_callback(invoke.close)
            for instance in self._instances:
                endpoint = Endpoint(instance.name, instance.address)
                functions.function_is(_deployment(instance.plan), [endpoint], wanted=1)
            shared_jobs = shared_store(settings, STORES)
            queue = await exits.enter_async_context(opened_queue(settings, shared_jobs, log))
            self.jobs = queue
            rule = CallbackRule(allowed=settings.callback_allowed)
            hooks = Hooks(
                *(settings, functions, invoke, meters, queue, job_intake(queue, invoke, rule)),
                *(shared_jobs, None, 1.0, log),
            )
            started = [await exits.enter_async_context(feature(hooks)) for feature in FEATURES]
            await self._has_workflow([part for part in started if part is not None])
            worker = await exits.enter_async_context(
                jobs_of(settings, functions, invoke, queue, rule, hooks.job_calls, log)
            )
            most_bytes = settings.async_max_body_bytes
            app = GatewayApp(
                invoke=invoke,
                system=invoke,
                auth=None,
                ready=lambda: True,
                metrics=meters.text,
                system_meters=ApiMeters(),
                routes={
                    "async-function": hooks.intake(functions.id_by_path, max_body_bytes=most_bytes),
                    **hooks.routes,
                },
                below_system={
                    "jobs": make_job_routes(queue, lambda: worker.running),
                    **hooks.below_system,
                },
            )
            await exits.enter_async_context(serving(app, listener(self.name, PORT), _DRAIN_S))
            self.serves = True
            exits.callback(self.died)
            await asyncio.Event().wait()

    async def _has_workflow(self, tables: Sequence[object]) -> None:
        """Keep the feature's table, unless the feature has left, and deploy this gateway's own."""
        self.workflows = cast(TextCopy, tables[0]) if tables else None
        scenario = self._around.scenario
        if self.workflows is not None and scenario.workflow and not scenario.shared_queue:
            text = workflow_text([each.plan for each in self._instances])
            await self.workflows.follow(WORKFLOW, text)

    def _changed(self, function: Function) -> None:
        self.leases.tell_terms(function.id.for_scheduler, function.options.terms)


def workflow_text(functions: Sequence[PlannedFunction], version: int = 0) -> str:
    """A stage for each function of its namespace, each behind the one before.

    Versions differ in their limit.
    """
    namespace, name = WORKFLOW
    lines = [f"workflow: {name}", f"namespace: {namespace}"]
    lines += [f"timeout_ms: {_WORKFLOW_MS + version}", "stages:"]
    stages = [each for each in functions if each.tenant == namespace]
    for number, function in enumerate(stages):
        lines += [f"  stage{number}:", f"    function: {function.name}"]
        lines += [f"    after: [stage{number - 1}]"] if number else []
    return "\n".join(lines) + "\n"


def _deployment(function: PlannedFunction) -> Deployment:
    name = FunctionId(function.tenant, function.name)
    return Deployment(name, "image", annotations=function.annotations)
