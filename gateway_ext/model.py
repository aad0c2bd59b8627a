"""Values of the gateway: functions as deployed, and as they run. Frozen."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

DEFAULT_NAMESPACE = "openfaas-fn"

# Dataclasses of Python 3.11 accept no default that cannot be hashed: it is given by a function.
_NOTHING: Mapping[str, str] = MappingProxyType({})


class FunctionId(NamedTuple):
    """A function's name in its namespace; the namespace is the tenant."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.name}.{self.namespace}"

    @property
    def for_scheduler(self) -> str:
        """The function's name in the scheduler and in GPU managers."""
        return f"{self.namespace}/{self.name}"

    @property
    def log_command(self) -> str:
        elsewhere = "" if self.namespace == DEFAULT_NAMESPACE else f" -n {self.namespace}"
        return f"faas-cli logs {self.name}{elsewhere}"


@dataclass(frozen=True, slots=True)
class Resources:
    """Quantities as they were sent (`128Mi`, `250m`); `gpu` is that of any maker."""

    memory: str = ""
    cpu: str = ""
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment as `faas-cli deploy` requests it."""

    id: FunctionId
    image: str
    process: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    constraints: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    annotations: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    limits: Resources | None = None
    requests: Resources | None = None
    read_only: bool = False


class SlowStart(NamedTuple):
    """What a start takes long for, for people, and when it began (by the loop's clock)."""

    what: str
    began_s: float


class Troubles(NamedTuple):
    """What keeps a function from being as it was deployed, for people; empty while nothing does.

    `start` is why nothing of it starts that could serve its calls, so that none need wait;
    `template` why its template is not warm; `partly` why an update or an instance of it does not
    start, though others serve its calls or may do so soon; `dying` how an instance ends that was
    ready, again and again; `slow` a start that others wait for.
    """

    start: str = ""
    template: str = ""
    partly: str = ""
    dying: str = ""
    slow: SlowStart | None = None


NO_TROUBLES = Troubles()


class Usage(NamedTuple):
    """The resources that a function's instances use together."""

    cpu_millicores: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class FunctionStatus:
    """A function and its replicas; `trouble` is why it is not as it was deployed, or empty.

    `template` is the state of the process that its instances are forked from, if there may be one.
    """

    deployment: Deployment
    replicas: int
    available_replicas: int
    created_at: datetime
    usage: Usage | None = None
    trouble: str = ""
    template: str = ""


class Endpoint(NamedTuple):
    """One ready instance: `unix:/path` or `tcp:host:port`, and the prefix of a call's path.

    `exited` resolves to the reason of its end, where the provider comes to know that.
    """

    instance: str
    address: str
    prefix: str = ""
    exited: asyncio.Future[str] | None = None


class LogLine(NamedTuple):
    """One line that an instance wrote."""

    function: FunctionId
    instance: str
    at: datetime
    text: str


class Namespace(NamedTuple):
    """A namespace with its labels and annotations."""

    name: str
    labels: Mapping[str, str] = _NOTHING
    annotations: Mapping[str, str] = _NOTHING
