"""Requests to a Docker Engine, with typed answers."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from common.liveness import signal_name
from common.numerals import natural
from common.time_limits import time_limit
from gateway_ext.providers.docker.engine import json_lines
from gateway_ext.providers.docker.engine.engine_transport import EngineRefused, EngineTransport
from gateway_ext.providers.managed.managed_instance import exited_with

OURS = "com.gpufaas.gateway"
FUNCTION = "com.gpufaas.function"
RELEASE = "com.gpufaas.release"
TEMPLATE = "com.gpufaas.template"
_FORBIDDEN, _GONE, _CONFLICT = 403, 404, 409
_PULL_BEGINS_S, _SLACK_S = 120.0, 30.0
_CHUNK = 1 << 16
_NS = 1e9
# A program may exit with 128 and more by itself, so only those that end programs are believed.
_ENDING = frozenset(
    {
        *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
        *(signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM),
    }
)


class EngineImage(NamedTuple):
    """An image on the Engine."""

    id: str
    has_our_template: bool


class ListedContainer(NamedTuple):
    """A container of this gateway, running or not."""

    name: str
    function: str
    release: str
    running: bool


class ContainerState(NamedTuple):
    """State of a container; `address` is that in its network, `why` the reason of its end."""

    running: bool
    address: str
    why: str


class ContainerEnd(NamedTuple):
    """The event that a container has ended."""

    name: str
    status: str


class ContainerUsage(NamedTuple):
    """Resources of a container: processor seconds since its start, memory now."""

    cpu_s: float
    memory_bytes: int


class EngineClient:
    """One Engine; lists what is labelled with the name of this gateway.

    A pull fails when the Engine reports no progress for `pull_quiet_s`.
    """

    def __init__(
        self, transport: EngineTransport, gateway: str, pull_quiet_s: float = 600.0
    ) -> None:
        self._transport = transport
        self._gateway = gateway
        self._pull_quiet_s = pull_quiet_s

    @property
    def url(self) -> str:
        """The URL of the Engine."""
        return self._transport.url

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels that mark containers, volumes and networks as this gateway's."""
        return {OURS: self._gateway}

    # -- containers -----------------------------------------------------------------------------

    async def containers(self) -> list[ListedContainer]:
        """All containers of this gateway."""
        found = await self._transport.call(
            "GET", "/containers/json", {"all": "1", **self._filter()}
        )
        return [_container(one) for one in found]

    async def create(self, name: str, body: Mapping[str, object]) -> None:
        """Create a container without starting it."""
        await self._transport.call("POST", "/containers/create", {"name": name}, body)

    async def start(self, name: str) -> None:
        """Start a container; nothing happens if it runs already."""
        await self._transport.call("POST", f"/containers/{name}/start")

    async def stop(self, name: str, within_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `within_s`; returns when the container has ended."""
        query = {"t": str(round(within_s))}
        await self._transport.call(
            *("POST", f"/containers/{name}/stop", query), within_s=within_s + _SLACK_S
        )

    async def kill(self, name: str) -> None:
        """Send SIGKILL."""
        await self._transport.call("POST", f"/containers/{name}/kill")

    async def remove(self, name: str) -> None:
        """Remove a container and its anonymous volumes, running or not; none is fine too."""
        try:
            await self._transport.call("DELETE", f"/containers/{name}", {"force": "1", "v": "1"})
        except EngineRefused as refused:
            if refused.status not in {_GONE, _CONFLICT}:
                raise  # a conflict: it is being removed already

    async def inspect(self, name: str, network: str) -> ContainerState | None:
        """The state of a container; None if there is none of this name."""
        found = await self._found(f"/containers/{name}/json")
        return None if found is None else _inspected(found, network)

    async def put(self, name: str, folder: str, archive: bytes) -> None:
        """Unpack a tar archive in a folder of a container."""
        await self._transport.call("PUT", f"/containers/{name}/archive", {"path": folder}, archive)

    async def usage(self, name: str) -> ContainerUsage:
        """Resources of a container; zero if it has ended."""
        query = {"stream": "0", "one-shot": "1"}
        try:
            found = await self._transport.call("GET", f"/containers/{name}/stats", query)
        except EngineRefused as refused:
            if refused.status in {_GONE, _CONFLICT}:
                return ContainerUsage(0.0, 0)
            raise
        return _usage(found)

    # -- images ---------------------------------------------------------------------------------

    async def image(self, name: str) -> EngineImage | None:
        """The image of this name or id; None if it is not on the Engine."""
        found = await self._found(f"/images/{name}/json")
        if found is None:
            return None
        labels = (found.get("Config") or {}).get("Labels") or {}
        return EngineImage(found["Id"], TEMPLATE in labels)

    async def pull(self, name: str, credentials: str) -> None:
        """Pull an image from its registry; EngineRefused has the reason of a failure."""
        headers = {"X-Registry-Auth": credentials} if credentials else {}
        query = {"fromImage": name if _has_tag(name) else f"{name}:latest"}
        begun = self._transport.stream(
            *("POST", "/images/create", query), headers=headers, within_s=_PULL_BEGINS_S
        )
        async with begun as content, _progress_within(self._pull_quiet_s) as until:
            async for step in json_lines.objects(content):
                if "error" in step:
                    raise EngineRefused(0, str(step["error"]).strip())
                until.reschedule(asyncio.get_running_loop().time() + self._pull_quiet_s)

    async def usual_registry(self) -> str:
        """The registry of images whose name has no registry, as `docker login` calls it."""
        return str((await self._transport.call("GET", "/info")).get("IndexServerAddress", ""))

    async def cores(self) -> int:
        """The number of processors that the Engine has."""
        return max(1, int((await self._transport.call("GET", "/info")).get("NCPU", 1)))

    # -- networks and volumes -------------------------------------------------------------------

    async def has_network(self, name: str) -> bool:
        """Whether there is one of this name."""
        return await self._found(f"/networks/{name}") is not None

    async def remove_network(self, name: str) -> None:
        """Remove a network, if this gateway made it and no container is in it."""
        found = await self._found(f"/networks/{name}")
        if found is None or (found.get("Labels") or {}).get(OURS) != self._gateway:
            return
        try:
            await self._transport.call("DELETE", f"/networks/{name}")
        except EngineRefused as refused:
            if refused.status not in {_GONE, _FORBIDDEN, _CONFLICT}:
                raise

    async def make_network(self, body: Mapping[str, object]) -> None:
        """Create a network; nothing happens if one of its name was made meanwhile."""
        try:
            await self._transport.call(
                "POST", "/networks/create", None, {**body, "CheckDuplicate": True}
            )
        except EngineRefused as refused:
            if refused.status != _CONFLICT:
                raise

    async def volumes(self) -> Mapping[str, Mapping[str, str]]:
        """Names and labels of this gateway's volumes."""
        found = await self._transport.call("GET", "/volumes", self._filter())
        return {one["Name"]: one.get("Labels") or {} for one in found.get("Volumes") or ()}

    async def has_volume(self, name: str) -> bool:
        """Whether there is one of this name."""
        return await self._found(f"/volumes/{name}") is not None

    async def make_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Create a volume; nothing happens if it exists."""
        await self._transport.call(
            "POST", "/volumes/create", None, {"Name": name, "Labels": dict(labels)}
        )

    async def remove_volume(self, name: str) -> bool:
        """Delete a volume; False if a container still has it."""
        try:
            await self._transport.call("DELETE", f"/volumes/{name}")
        except EngineRefused as refused:
            if refused.status not in {_GONE, _CONFLICT}:
                raise
            return refused.status == _GONE
        return True

    # -- streams --------------------------------------------------------------------------------

    async def endings(self, listening: asyncio.Event) -> AsyncGenerator[ContainerEnd, None]:
        """Yield the ends of this gateway's containers from the time when `listening` is set."""
        filters = {"type": ["container"], "event": ["die"], "label": self._label()}
        query = {"filters": json.dumps(filters)}
        async with self._transport.stream("GET", "/events", query) as content:
            listening.set()
            async for event in json_lines.objects(content):
                actor = event.get("Actor", {}).get("Attributes", {})
                yield ContainerEnd(actor.get("name", ""), actor.get("exitCode", ""))

    async def output(self, name: str, since: datetime | None) -> AsyncGenerator[bytes, None]:
        """Yield the output of a container since then, in frames, until it ends."""
        query = {"follow": "1", "stdout": "1", "stderr": "1", "timestamps": "1"}
        if since is not None:
            query["since"] = f"{since.timestamp():.6f}"
        async with self._transport.stream("GET", f"/containers/{name}/logs", query) as content:
            async for data in content.iter_chunked(_CHUNK):
                yield data

    async def _found(self, path: str) -> dict[str, Any] | None:
        try:
            found = await self._transport.call("GET", path)
        except EngineRefused as refused:
            if refused.status == _GONE:
                return None
            raise
        return dict(found)

    def _filter(self) -> dict[str, str]:
        return {"filters": json.dumps({"label": self._label()})}

    def _label(self) -> Sequence[str]:
        return [f"{OURS}={self._gateway}"]


@contextlib.asynccontextmanager
async def _progress_within(quiet_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Raise EngineRefused after `quiet_s`, unless the time-out is rescheduled before."""
    try:
        async with time_limit(quiet_s) as until:
            yield until
    except TimeoutError as error:
        raise EngineRefused(0, f"no progress for {quiet_s:g} s") from error


def _container(answer: Mapping[str, Any]) -> ListedContainer:
    labels = answer.get("Labels") or {}
    return ListedContainer(
        name=answer["Names"][0].removeprefix("/"),
        function=labels.get(FUNCTION, ""),
        release=labels.get(RELEASE, ""),
        running=answer.get("State") == "running",
    )


def _inspected(answer: Mapping[str, Any], network: str) -> ContainerState:
    state = answer["State"]
    networks = answer.get("NetworkSettings", {}).get("Networks") or {}
    return ContainerState(
        running=bool(state.get("Running")),
        address=(networks.get(network) or {}).get("IPAddress", ""),
        why=_why(state),
    )


def _why(state: Mapping[str, Any]) -> str:
    if state.get("OOMKilled"):
        return "was killed: it took more memory than it may"
    return ended_with(str(state.get("ExitCode", "")), state.get("Error", ""))


def ended_with(status: str, error: str = "") -> str:
    """Describe how a container ended."""
    code = natural(status) or 0
    signal_number = code - 128
    if signal_number in _ENDING:
        text = f"was ended by {signal_name(signal_number)}"
    else:
        text = exited_with(status or "unknown")
    return f"{text}: {error}" if error else text


def _usage(answer: Mapping[str, Any]) -> ContainerUsage:
    memory = answer.get("memory_stats") or {}
    details = memory.get("stats") or {}
    # Without the file cache, which the kernel frees under pressure; cgroups v1 and v2 differ.
    cached = details.get("total_inactive_file", details.get("inactive_file", 0))
    total = ((answer.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage", 0)
    return ContainerUsage(total / _NS, max(0, memory.get("usage", 0) - cached))


def _has_tag(name: str) -> bool:
    return ":" in name.rpartition("/")[2]
