"""One version of a function: its replicas, as many as are wanted of it."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway_ext import quantities, wishes
from gateway_ext.model import Deployment
from gateway_ext.ports import Injection
from gateway_ext.providers.function_log import FunctionLog
from gateway_ext.providers.process import builds
from gateway_ext.providers.process.instance import Instance, Place
from gateway_ext.providers.process.launching import RUNTIME, Orders, interpreter_folders
from gateway_ext.providers.process.settings import ProcessSettings
from gateway_ext.providers.process.store import Record
from gateway_ext.providers.replica import Watch
from gateway_ext.providers.replicas import Replicas


@dataclass(frozen=True, slots=True)
class Kit:
    """What all functions of a provider share."""

    settings: ProcessSettings
    sockets: Path
    injection: Injection | None
    mark: str


class Generation(Replicas[Instance]):
    """Replicas that run one build in one environment."""

    def __init__(
        self,
        record: Record,
        python: Path,
        kit: Kit,
        log: FunctionLog,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(Watch(self._make, changed, log, kit.settings))
        self.record = record
        self._orders = _orders(record, python, kit)
        memory = _memory_bytes(record.deployment)
        self._place = Place(kit.sockets, log, kit.mark, memory)

    @property
    def deployment(self) -> Deployment:
        """What they run."""
        return self.record.deployment

    async def _make(self) -> Instance:
        return Instance(self.record.deployment.id.name[:40], self._orders, self._place)


def _orders(record: Record, python: Path, kit: Kit) -> Orders:
    deployment = record.deployment
    wished = wishes.of(deployment)
    injected: Mapping[str, str] = {}
    if wished.gpu and kit.injection is not None:
        injected = kit.injection.environment(deployment.id)
    cpus = _cpus(deployment)
    shim = [path for path in injected.get("PYTHONPATH", "").split(os.pathsep) if path]
    visible = [
        *interpreter_folders(kit.settings.base_python),
        *map(str, kit.settings.visible),
        *(str(Path(path).parent) for path in shim),
        str(python.parents[1]),
        str(record.folder),
    ]
    return Orders(
        command=[str(python), str(RUNTIME)],
        environment=_environment(record, python, injected, wished) | _threads(cpus),
        cwd=str(record.build),
        uid=record.uid,
        cpus=cpus,
        secrets=str(secrets_folder(record)),
        visible=visible,
    )


def secrets_folder(record: Record) -> Path:
    """Where its instances see their secrets."""
    return record.folder / "secrets"


def home_folder(record: Record) -> Path:
    """Where its instances may write."""
    return record.folder / "home"


def _environment(
    record: Record, python: Path, injected: Mapping[str, str], wished: wishes.Wishes
) -> dict[str, str]:
    own = dict(record.deployment.environment)
    home, secrets = str(home_folder(record)), str(secrets_folder(record))
    defaults = {
        "LANG": "C.UTF-8",
        "HOME": home,
        "TMPDIR": home,
        "PYTHONDONTWRITEBYTECODE": "1",  # the build is not its own to write to
        # The gateway answers at its time; a second later the runtime gives the call up as well.
        "exec_timeout": str(math.ceil(wished.timeout_s) + 1),
        **({"GPUFAAS_THREADS": str(wished.concurrency)} if wished.concurrency else {}),
    }
    ours = {
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "OPENFAAS_SECRETS_DIR": secrets,
        "secret_mount_path": secrets,
        "GPUFAAS_HANDLER": str(builds.handler_of(record.build)),
        "GPUFAAS_WORKERS": str(wished.workers),
    }
    paths = [one for one in (injected.get("PYTHONPATH"), own.get("PYTHONPATH")) if one]
    joined = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {**defaults, **own, **ours, **injected, **joined}


def _threads(cpus: list[int]) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(len(cpus))} if cpus else {}


def _memory_bytes(deployment: Deployment) -> int | None:
    limits = deployment.limits
    return quantities.memory_bytes(limits.memory) if limits and limits.memory else None


def _cpus(deployment: Deployment) -> list[int]:
    """Whole processors for a limit in parts of them, from another place for every function."""
    limits = deployment.limits
    allowed = sorted(os.sched_getaffinity(0))
    if not limits or not limits.cpu:
        return []
    count = math.ceil(quantities.cpus(limits.cpu))
    if count >= len(allowed):
        return []
    first = sum(map(ord, str(deployment.id)))
    return [allowed[(first + number) % len(allowed)] for number in range(count)]
