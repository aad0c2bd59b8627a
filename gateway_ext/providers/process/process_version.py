"""One version of a function: its processes, as many as are wanted."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway_ext.model import Deployment
from gateway_ext.openfaas import function_options, quantities
from gateway_ext.ports import Injection
from gateway_ext.providers.function_environment import (
    gpu_environment,
    runtime_defaults,
    runtime_settings,
)
from gateway_ext.providers.managed.logs.function_log import FunctionLog
from gateway_ext.providers.managed.replica import Replica, ReplicaContext
from gateway_ext.providers.managed.replica_set import ReplicaSet
from gateway_ext.providers.process import build_folders
from gateway_ext.providers.process.build_store import BuildRecord
from gateway_ext.providers.process.child_instance import ChildInstance, ChildPlace
from gateway_ext.providers.process.process_launch import RUNTIME, LaunchOrders, interpreter_folders
from gateway_ext.providers.process.process_settings import ProcessProviderSettings
from gateway_ext.providers.process.template.function_template import FunctionTemplate
from gateway_ext.providers.process.template.template_run import TemplatePlace

_NAME_LENGTH = 40
# Calls for the template, beside the handler; the runtime reads the file.
_EXAMPLES = "example.json"
# Only for a user of its own: other processes of the gateway's user would count, too.
_LIMITS = {"RLIMIT_CORE": 0, "RLIMIT_NPROC": 4096}


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """What all functions of a process provider share; `leaders` are ids of running instances."""

    settings: ProcessProviderSettings
    sockets: Path
    injection: Injection | None
    mark: str
    leaders: set[int] = field(default_factory=set)


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
        super().__init__(ReplicaContext(changed, log, parts.settings))
        self.record = record
        self._orders = _orders(record, python, parts)
        memory = memory_limit_bytes(record.deployment)
        options = function_options.of(record.deployment)
        name = record.deployment.id.name[:_NAME_LENGTH]
        processes = TemplatePlace(name, log, parts.mark, parts.leaders)
        self._place = ChildPlace(changed, parts.sockets, processes, memory, options.timeout_s)
        examples = build_folders.handler_of(record.build) / _EXAMPLES
        self.template = FunctionTemplate(
            self._orders,
            processes,
            changed,
            start_s=parts.settings.start_timeout_s,
            has_examples=examples.is_file(),
            refused=_template_refused(options, parts.settings),
        )

    @property
    def deployment(self) -> Deployment:
        """The deployment that they run."""
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

    async def _make(self) -> ChildInstance:
        return await ChildInstance.start(self._orders, self.template, self._place)


def _orders(record: BuildRecord, python: Path, parts: ProcessParts) -> LaunchOrders:
    deployment = record.deployment
    shows_errors = parts.settings.shows_errors
    options = function_options.of(deployment, default_shows_errors=shows_errors)
    injected = gpu_environment(parts.injection, deployment)
    cpus = _cpus(deployment)
    shim = [path for path in injected.get("PYTHONPATH", "").split(os.pathsep) if path]
    visible = [
        *interpreter_folders(parts.settings.base_python),
        *map(str, parts.settings.visible),
        *(str(Path(path).parent) for path in shim),
        str(python.parents[1]),
        str(record.folder),
    ]
    return LaunchOrders(
        command=[str(python), str(RUNTIME)],
        environment=_environment(record, python, injected, options) | _threads(cpus),
        cwd=str(record.build),
        uid=record.uid,
        cpus=cpus,
        secrets=str(secrets_folder(record)),
        visible=visible,
        limits=_LIMITS if record.uid is not None else {},
    )


def _template_refused(
    options: function_options.FunctionOptions, settings: ProcessProviderSettings
) -> str:
    if not settings.template_bytes:
        return "the gateway keeps none"
    if not options.template:
        return "the function wants none"
    return "its workers are processes that it starts itself" if options.workers > 1 else ""


def secrets_folder(record: BuildRecord) -> Path:
    """The folder in which its instances find their secrets."""
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
        "GPUFAAS_HANDLER": str(build_folders.handler_of(record.build)),
        **runtime_settings(record.deployment.id, options),
    }
    paths = [one for one in (injected.get("PYTHONPATH"), own.get("PYTHONPATH")) if one]
    joined = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {**defaults, **own, **ours, **injected, **joined}


def _threads(cpus: list[int]) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(len(cpus))} if cpus else {}


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
