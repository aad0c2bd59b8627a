"""One function of the process provider: its build, its environment, and the processes of both."""

import asyncio
import logging
import math
import os
import secrets
import signal
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from common.liveness import LivenessTimes, signal_name, until_frozen
from common.tasks import BackgroundTasks
from gateway_ext.model import Deployment, Endpoint
from gateway_ext.openfaas import function_options, quantities
from gateway_ext.ports import FunctionListener, Injection
from gateway_ext.providers.function_environment import (
    gpu_environment,
    runtime_defaults,
    runtime_settings,
)
from gateway_ext.providers.managed.function import InstanceUsage, ManagedFunction
from gateway_ext.providers.managed.logs import FunctionLog
from gateway_ext.providers.managed.replicas import (
    ManagedInstance,
    Replica,
    ReplicaSet,
    answers,
    exited_with,
)
from gateway_ext.providers.process import builds, processes
from gateway_ext.providers.process.builds import BuildRecord, BuildStore
from gateway_ext.providers.process.launch import (
    RUNTIME,
    InstanceProcess,
    LaunchedProcess,
    LaunchOrders,
    interpreter_folders,
    launch,
)
from gateway_ext.providers.process.python_environments import PythonEnvironments
from gateway_ext.providers.process.settings import ProcessBounds, base_python
from gateway_ext.providers.process.template import FunctionTemplate
from gateway_ext.providers.process.template_run import ProcessPlace, live, named, new_name
from gateway_ext.settings import GatewaySettings

log = logging.getLogger(__name__)

_NAME_LENGTH = 40
# Calls for the template, beside the handler; the runtime reads the file.
_EXAMPLES = "example.json"
# Only for a user of its own: other processes of the gateway's user would count, too.
_LIMITS = {"RLIMIT_CORE": 0, "RLIMIT_NPROC": 4096}


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """What all functions of a process provider share; `leaders` are ids of running instances."""

    settings: GatewaySettings
    bounds: ProcessBounds
    sockets: Path
    injection: Injection | None
    mark: str
    leaders: set[int] = field(default_factory=set)


_BACKLOG = 1024
# A function that is stopped is replaced soon. One that only does not answer may have a handler that
# blocks its event loop, which no call should do for much longer than the function's time limit.
LIVENESS = LivenessTimes(look_s=0.75, ask_s=10.0)
_BLOCKED_S = 600.0


@dataclass(eq=False)
class ChildInstance(ManagedInstance):
    """A process from its start to its end, with all processes that descend from it."""

    path: Path
    process: InstanceProcess
    place: ProcessPlace
    template: FunctionTemplate | None  # what the process is a fork of

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory_bytes = self.place.memory_bytes
        self._stopping = False
        self.place.leaders.add(self.process.pid)
        self.process.gone.add_done_callback(self._leave)
        self.process.exited.add_done_callback(self._handle_exit)

    @classmethod
    async def start(
        cls, orders: LaunchOrders, template: FunctionTemplate, place: ProcessPlace
    ) -> Self:
        """An instance that is a fork of the template or, without a usable one, started anew."""
        name = new_name(place)
        path = place.sockets / f"{secrets.token_hex(5)}.sock"
        listener = _listener(path)
        try:
            forked = await template.fork(name, listener.fileno())
            process: InstanceProcess = forked or InstanceProcess.started(
                _started(orders, name, listener, place)
            )
        except BaseException:
            path.unlink()
            raise
        finally:
            listener.close()  # the process has its own: after its end connections are refused
        return cls(name, path, process, place, None if forked is None else template)

    @property
    def pid(self) -> int:
        """The leader of its session."""
        return self.process.pid

    @property
    def is_warm(self) -> bool:
        """Whether it began with what the example calls had traced."""
        return self.process.is_warm

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.name, f"unix:{self.path}", exited=self.exited)

    async def collect_output(self) -> None:
        """Store its output until it has ended; then kill all processes that it has started."""
        watching = asyncio.create_task(self._kill_if_frozen())
        try:
            await live(self.process, self.name, self.place)
        finally:
            watching.cancel()

    async def until_ready(self, within_s: float) -> bool:
        ready = await super().until_ready(within_s)
        if self.template is not None and not self._stopping:
            self.template.fork_ended_up(ready=ready)
        return ready

    async def stop(self, within_s: float) -> None:
        self.ready = False
        self._stopping = True
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self.exited), within_s)
        except TimeoutError:
            why = f"was killed: it did not end within {within_s:g} s"
            self.place.log.write(self.name, why)
            self.kill(why)
            await asyncio.shield(self.exited)

    def kill(self, why: str) -> None:
        """Kill its session at once; `why` is the reason that `exited` resolves to."""
        if not self.exited.done() and not self._why:
            self._why = why
        if not self.exited.done():
            processes.kill_session(self.process.pid)
            self._signal(signal.SIGKILL)

    def enforce_memory_limit(self, usage: processes.ProcessUsage) -> None:
        limit_bytes = self.memory_bytes
        if limit_bytes is not None and usage.own_bytes > limit_bytes:
            self.kill(
                f"was killed: it took {usage.own_bytes >> 20} MiB of memory,"
                f" its limit is {limit_bytes >> 20} MiB"
            )

    def usage(self) -> InstanceUsage:
        """Resources of all processes in its session."""
        pids = [] if self.exited.done() else processes.sessions().get(self.pid, [])
        usage = processes.usage(pids)
        return InstanceUsage(usage.cpu_s, usage.resident_bytes)

    def _signal(self, number: int) -> None:
        if not self.exited.done():
            self.process.send_signal(number)

    def _leave(self, _: asyncio.Future[None]) -> None:
        """Take no call any more: callers notice the end of a process as soon as it is there."""
        if self.ready:
            self.ready = False
            self.place.changed()

    def _handle_exit(self, ended: asyncio.Future[int]) -> None:
        self.place.leaders.discard(self.pid)
        self.path.unlink(missing_ok=True)
        self.set_ended(_described(ended.result()))

    async def _kill_if_frozen(self) -> None:
        blocked_s = self.place.timeout_s + _BLOCKED_S
        times = replace(LIVENESS, blocked_s=blocked_s, start_s=math.inf)
        why = await until_frozen(self.pid, self._answers, times)
        self.kill(f"was killed: it {why}")

    async def _answers(self) -> bool:
        return self.ready and await self._answers_at(b"health")

    async def _is_ready(self) -> bool:
        return await self._answers_at(b"ready")

    async def _answers_at(self, route: bytes) -> bool:
        return await answers(asyncio.open_unix_connection(str(self.path)), route)


def _started(
    orders: LaunchOrders, name: str, listener: socket.socket, place: ProcessPlace
) -> LaunchedProcess:
    served = {"GPUFAAS_LISTEN": f"fd:{listener.fileno()}"}
    environment = {**orders.environment, **named(name, place), **served}
    return launch(replace(orders, environment=environment), [listener.fileno()])


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _described(status: int) -> str:
    if status >= 0:
        return exited_with(status)
    return f"was ended by {signal_name(-status)}"


class ProcessVersion(ReplicaSet[ChildInstance]):
    """Replicas that run one build in one environment."""

    def __init__(
        self,
        record: BuildRecord,
        python: Path,
        parts: ProcessParts,
        log: FunctionLog,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(changed, log, parts.bounds)
        self.record = record
        self._orders = _orders(record, python, parts)
        options = function_options.of(record.deployment)
        self._place = ProcessPlace(
            *(record.deployment.id.name[:_NAME_LENGTH], log, parts.mark, parts.leaders),
            changed,
            parts.sockets,
            memory_limit_bytes(record.deployment),
            options.timeout_s,
        )
        examples = builds.handler_of(record.build_folder) / _EXAMPLES
        self.template = FunctionTemplate(
            self._orders,
            self._place,
            start_s=parts.bounds.start_timeout_s,
            has_examples=examples.is_file(),
            refused=_template_refused(options, parts.settings),
        )

    @property
    def deployment(self) -> Deployment:
        return self.record.deployment

    @property
    def outdated(self) -> list[Replica[ChildInstance]]:
        """Replicas without what the example calls have traced since they were started."""
        if not (self.template.alive and self.template.warm):
            return []
        return [
            replica
            for replica in self.replicas
            if replica.ready and replica.instance is not None and not replica.instance.is_warm
        ]

    async def make(self) -> ChildInstance:
        return await ChildInstance.start(self._orders, self.template, self._place)


def _orders(record: BuildRecord, python: Path, parts: ProcessParts) -> LaunchOrders:
    deployment = record.deployment
    shows_errors = parts.settings.shows_errors
    options = function_options.of(deployment, default_shows_errors=shows_errors)
    injected = gpu_environment(parts.injection, deployment)
    cpus = _cpus(deployment)
    shim = [path for path in injected.get("PYTHONPATH", "").split(os.pathsep) if path]
    visible = [
        *interpreter_folders(base_python(parts.settings)),
        *parts.settings.visible,
        *(str(Path(path).parent) for path in shim),
        str(python.parents[1]),
        str(record.folder),
    ]
    return LaunchOrders(
        command=[str(python), str(RUNTIME)],
        environment=_environment(record, python, injected, options)
        | ({"OMP_NUM_THREADS": str(len(cpus))} if cpus else {}),
        cwd=str(record.build_folder),
        uid=record.uid,
        cpus=cpus,
        secrets=str(secrets_folder(record)),
        visible=visible,
        limits=_LIMITS if record.uid is not None else {},
    )


def _template_refused(options: function_options.FunctionOptions, settings: GatewaySettings) -> str:
    if not settings.template_bytes:
        return "the gateway keeps none"
    if not options.template:
        return "the function wants none"
    return "its workers are processes that it starts itself" if options.workers > 1 else ""


def secrets_folder(record: BuildRecord) -> Path:
    return record.folder / "secrets"


def home_folder(record: BuildRecord) -> Path:
    """The folder that its instances may write to."""
    return record.folder / "home"


def _environment(
    record: BuildRecord,
    python: Path,
    injected: Mapping[str, str],
    options: function_options.FunctionOptions,
) -> dict[str, str]:
    own = dict(record.deployment.environment)
    home, secrets = str(home_folder(record)), str(secrets_folder(record))
    defaults = {
        "LANG": "C.UTF-8",
        "HOME": home,
        "TMPDIR": home,
        "PYTHONDONTWRITEBYTECODE": "1",  # functions may not write to the build
        **runtime_defaults(options),
    }
    ours = {
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "OPENFAAS_SECRETS_DIR": secrets,
        "secret_mount_path": secrets,
        "GPUFAAS_HANDLER": str(builds.handler_of(record.build_folder)),
        **runtime_settings(record.deployment.id, options),
    }
    paths = [path for path in (injected.get("PYTHONPATH"), own.get("PYTHONPATH")) if path]
    joined = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {**defaults, **own, **ours, **injected, **joined}


def memory_limit_bytes(deployment: Deployment) -> int | None:
    """The most memory of one instance; None if there is no limit."""
    limits = deployment.limits
    return quantities.memory_bytes(limits.memory) if limits and limits.memory else None


def _cpus(deployment: Deployment) -> list[int]:
    """Whole processors for a limit in fractions; the first one depends on the function's name."""
    limits = deployment.limits
    allowed = sorted(os.sched_getaffinity(0))
    if not limits or not limits.cpu:
        return []
    count = math.ceil(quantities.cpus(limits.cpu))
    if count >= len(allowed):
        return []
    first = sum(map(ord, str(deployment.id)))
    return [allowed[(first + number) % len(allowed)] for number in range(count)]


class ProcessFunction(ManagedFunction[BuildRecord, ProcessVersion]):
    """A deployed function; `prune` and `show_secrets` are the provider's."""

    note_suffix = "build"
    usage_over_s = 0.2

    def __init__(
        self,
        record: BuildRecord,
        parts: ProcessParts,
        store: BuildStore,
        environments: PythonEnvironments,
        listener: FunctionListener,
        prune: Callable[[], Coroutine[Any, Any, None]],
        *,
        show_secrets: Callable[[BuildRecord, Iterable[str]], None],
    ) -> None:
        super().__init__(record, store, parts.bounds, listener)
        self._parts = parts
        self._environments = environments
        self._prune = prune
        self._show_secrets = show_secrets
        self._shows_old_secrets = False  # those that the previous version may still read
        self._pruning: asyncio.Task[None] | None = None
        self._made: list[ProcessVersion] = []  # those whose templates are not closed
        self._closing = BackgroundTasks(log, "ending templates")

    def begin(self) -> None:
        """Store the record and start its build; the current version serves until it is ready."""
        self._store.save(self.record)
        record = self.record
        self.replace_version(lambda: self._make(record))

    def update(self, record: BuildRecord) -> None:
        before, self.record = self.record, record
        self._shows_old_secrets = True
        self.begin()
        if before.build_folder not in self.builds:
            self._store.discard(before.build_folder)

    @property
    def builds(self) -> set[Path]:
        """Builds that instances run in, now or soon."""
        return {
            self.record.build_folder,
            *(version.record.build_folder for version in self.present),
        }

    @property
    def secrets(self) -> set[str]:
        records = [self.record, *(version.record for version in self.versions)]
        return {name for record in records for name in record.deployment.secrets}

    @property
    def instances(self) -> list[ChildInstance]:
        return [instance for version in self.versions for instance in version.instances]

    @property
    def templates(self) -> list[tuple[FunctionTemplate, bool]]:
        """Those that have processes, and whether their versions have instances."""
        return [
            (version.template, bool(version.replicas))
            for version in self._made
            if version.template.alive or version.template.busy  # its calls may outlive it
        ]

    @property
    def template_bytes(self) -> int:
        return sum(template.memory_bytes for template, _ in self.templates)

    def renew_templates(self, why: str) -> None:
        """Have later instances import the handler anew."""
        for version in self._made:
            version.template.renew(why)

    def template_text(self, *, usage: bool) -> str:
        """The state of the current version's template, for people."""
        current = self.current
        if current is None:
            return ""
        template = current.template
        memory = f", {template.memory_bytes >> 20} MiB" if usage and template.alive else ""
        return f"{template.text}{memory}"

    @property
    def template_trouble(self) -> str:
        """Why the current version's template is not warm although it has example calls."""
        current = self.current
        return "" if current is None else current.template.bad_examples

    @property
    def memory_bytes(self) -> int | None:
        return memory_limit_bytes(self.record.deployment)

    def enforce_memory_limit_outside(self, pids: Collection[int], used_bytes: int) -> None:
        """Kill processes that left their instances if they take more than an instance may."""
        limit_bytes = self.memory_bytes
        if limit_bytes is not None and used_bytes > limit_bytes:
            processes.kill(pids)
            self.note(
                f"processes that left their instance were killed: they took {used_bytes >> 20} MiB"
                f" of memory, the limit is {limit_bytes >> 20} MiB"
            )

    async def stop(self, *, drain: bool) -> None:
        try:
            await super().stop(drain=drain)
        finally:
            await asyncio.gather(*(version.template.close() for version in self._made))
            await self._closing.wait()

    def instances_ended(self, version: ProcessVersion) -> None:
        """End the template, and delete secrets, build and environment that nothing needs."""
        if version not in self.present and version in self._made:
            self._made.remove(version)
            self._closing.start(version.template.close())
        if self._shows_old_secrets and self.settled:
            self._show_secrets(self.record, self.secrets)
            # The next version may still be in the making, and the previous one serve meanwhile.
            self._shows_old_secrets = self.secrets != set(self.record.deployment.secrets)
        if version.record.build_folder not in self.builds:
            self._store.discard(version.record.build_folder)
            self._pruning = asyncio.create_task(self._prune())

    async def _make(self, record: BuildRecord) -> ProcessVersion:
        requirements = await asyncio.to_thread(builds.requirements_of, record.build_folder)
        namespace = record.deployment.id.namespace
        python = await self._environments.ready(namespace, requirements, self.note)
        made = ProcessVersion(record, python, self._parts, self.log, self.changed)
        self._made.append(made)
        return made

    async def _measure(self) -> Sequence[InstanceUsage]:
        return await asyncio.to_thread(lambda: [instance.usage() for instance in self.instances])
