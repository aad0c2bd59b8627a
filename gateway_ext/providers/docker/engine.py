"""What is asked of a Docker Engine, in values of ours."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from gateway_ext.providers.docker import lines
from gateway_ext.providers.docker.transport import EngineRefused, Transport

OURS = "com.gpufaas.gateway"
FUNCTION = "com.gpufaas.function"
RELEASE = "com.gpufaas.release"
TEMPLATE = "com.gpufaas.template"
_FORBIDDEN, _GONE, _CONFLICT = 403, 404, 409
_PULL_BEGINS_S, _PULL_QUIET_S, _SLACK_S = 120.0, 600.0, 30.0
_CHUNK = 1 << 16
_NS = 1e9


class Image(NamedTuple):
    """An image that is there; `ours` says that it was built on our template."""

    id: str
    ours: bool


class Container(NamedTuple):
    """A container that is ours, running or not."""

    name: str
    function: str
    release: str
    running: bool


class Inspected(NamedTuple):
    """How a container is; `address` is that in its network, `why` says how it ended."""

    running: bool
    address: str
    why: str


class Ended(NamedTuple):
    """A container has ended."""

    name: str
    status: str


class Taken(NamedTuple):
    """What a container takes: processor seconds since its start, memory now."""

    cpu_s: float
    memory_bytes: int


class Engine:
    """One Engine, as the gateway of this name sees it."""

    def __init__(self, transport: Transport, gateway: str) -> None:
        self._to = transport
        self._gateway = gateway

    @property
    def url(self) -> str:
        """Where it is."""
        return self._to.url

    @property
    def labels(self) -> Mapping[str, str]:
        """What marks things as this gateway's."""
        return {OURS: self._gateway}

    # -- containers -----------------------------------------------------------------------------

    async def containers(self) -> list[Container]:
        """All that are this gateway's."""
        found = await self._to.call("GET", "/containers/json", {"all": "1", **self._filter()})
        return [_container(one) for one in found]

    async def create(self, name: str, body: Mapping[str, object]) -> None:
        """It does not run yet."""
        await self._to.call("POST", "/containers/create", {"name": name}, body)

    async def start(self, name: str) -> None:
        """Nothing happens where it runs already."""
        await self._to.call("POST", f"/containers/{name}/start")

    async def stop(self, name: str, within_s: float) -> None:
        """SIGTERM, and SIGKILL after that time; returns when it has ended."""
        query = {"t": str(round(within_s))}
        await self._to.call(
            *("POST", f"/containers/{name}/stop", query), within_s=within_s + _SLACK_S
        )

    async def kill(self, name: str) -> None:
        """At once."""
        await self._to.call("POST", f"/containers/{name}/kill")

    async def remove(self, name: str) -> None:
        """With its anonymous volumes, running or not; nothing happens where it is gone."""
        try:
            await self._to.call("DELETE", f"/containers/{name}", {"force": "1", "v": "1"})
        except EngineRefused as refused:
            if refused.status not in {_GONE, _CONFLICT}:
                raise  # a conflict: somebody else removes it just now

    async def inspect(self, name: str, network: str) -> Inspected | None:
        """None where there is none."""
        found = await self._found(f"/containers/{name}/json")
        return None if found is None else _inspected(found, network)

    async def put(self, name: str, folder: str, archive: bytes) -> None:
        """Unpacks a tar in a container's folder."""
        await self._to.call("PUT", f"/containers/{name}/archive", {"path": folder}, archive)

    async def taken(self, name: str) -> Taken:
        """Nothing where it has ended."""
        query = {"stream": "0", "one-shot": "1"}
        try:
            found = await self._to.call("GET", f"/containers/{name}/stats", query)
        except EngineRefused as refused:
            if refused.status in {_GONE, _CONFLICT}:
                return Taken(0.0, 0)
            raise
        return _taken(found)

    # -- images ---------------------------------------------------------------------------------

    async def image(self, name: str) -> Image | None:
        """None where it is not there."""
        found = await self._found(f"/images/{name}/json")
        if found is None:
            return None
        labels = (found.get("Config") or {}).get("Labels") or {}
        return Image(found["Id"], TEMPLATE in labels)

    async def pull(self, name: str, credentials: str) -> None:
        """Get it from its registry; EngineRefused says why that cannot be."""
        headers = {"X-Registry-Auth": credentials} if credentials else {}
        query = {"fromImage": name if _has_tag(name) else f"{name}:latest"}
        begun = self._to.stream(
            *("POST", "/images/create", query), headers=headers, within_s=_PULL_BEGINS_S
        )
        async with begun as content, _quiet_for(_PULL_QUIET_S) as until:
            async for step in lines.said(content):
                if "error" in step:
                    raise EngineRefused(0, str(step["error"]).strip())
                until.reschedule(asyncio.get_running_loop().time() + _PULL_QUIET_S)

    async def usual_registry(self) -> str:
        """Where images come from whose name says no registry, as `docker login` calls it."""
        return str((await self._to.call("GET", "/info")).get("IndexServerAddress", ""))

    # -- networks and volumes -------------------------------------------------------------------

    async def has_network(self, name: str) -> bool:
        """Whether there is one."""
        return await self._found(f"/networks/{name}") is not None

    async def remove_network(self, name: str) -> None:
        """If this gateway has made it, and nothing is in it."""
        found = await self._found(f"/networks/{name}")
        if found is None or (found.get("Labels") or {}).get(OURS) != self._gateway:
            return
        try:
            await self._to.call("DELETE", f"/networks/{name}")
        except EngineRefused as refused:
            if refused.status not in {_GONE, _FORBIDDEN, _CONFLICT}:
                raise

    async def make_network(self, body: Mapping[str, object]) -> None:
        """Nothing happens where it was made meanwhile."""
        try:
            await self._to.call("POST", "/networks/create", None, {**body, "CheckDuplicate": True})
        except EngineRefused as refused:
            if refused.status != _CONFLICT:
                raise

    async def volumes(self) -> Mapping[str, Mapping[str, str]]:
        """This gateway's, with their labels."""
        found = await self._to.call("GET", "/volumes", self._filter())
        return {one["Name"]: one.get("Labels") or {} for one in found.get("Volumes") or ()}

    async def has_volume(self, name: str) -> bool:
        """Whether there is one."""
        return await self._found(f"/volumes/{name}") is not None

    async def make_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Nothing happens where it is there."""
        await self._to.call("POST", "/volumes/create", None, {"Name": name, "Labels": dict(labels)})

    async def remove_volume(self, name: str) -> bool:
        """False where a container has it still."""
        try:
            await self._to.call("DELETE", f"/volumes/{name}")
        except EngineRefused as refused:
            if refused.status not in {_GONE, _CONFLICT}:
                raise
            return refused.status == _GONE
        return True

    # -- streams --------------------------------------------------------------------------------

    async def endings(self, listening: asyncio.Event) -> AsyncGenerator[Ended, None]:
        """Containers of this gateway that end, from when `listening` is set."""
        filters = {"type": ["container"], "event": ["die"], "label": self._label()}
        query = {"filters": json.dumps(filters)}
        async with self._to.stream("GET", "/events", query) as content:
            listening.set()
            async for event in lines.said(content):
                actor = event.get("Actor", {}).get("Attributes", {})
                yield Ended(actor.get("name", ""), actor.get("exitCode", ""))

    async def output(self, name: str, since: datetime | None) -> AsyncGenerator[bytes, None]:
        """What it writes and has written since then, in frames; until it ends."""
        query = {"follow": "1", "stdout": "1", "stderr": "1", "timestamps": "1"}
        if since is not None:
            query["since"] = f"{since.timestamp():.6f}"
        async with self._to.stream("GET", f"/containers/{name}/logs", query) as content:
            async for data in content.iter_chunked(_CHUNK):
                yield data

    async def _found(self, path: str) -> dict[str, Any] | None:
        try:
            found = await self._to.call("GET", path)
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
async def _quiet_for(quiet_s: float) -> AsyncIterator[asyncio.Timeout]:
    """EngineRefused after that time, which whoever hears something begins anew."""
    try:
        async with asyncio.timeout(quiet_s) as until:
            yield until
    except TimeoutError as error:
        raise EngineRefused(0, f"nothing more came of it for {quiet_s:g} s") from error


def _container(said: Mapping[str, Any]) -> Container:
    labels = said.get("Labels") or {}
    return Container(
        name=said["Names"][0].removeprefix("/"),
        function=labels.get(FUNCTION, ""),
        release=labels.get(RELEASE, ""),
        running=said.get("State") == "running",
    )


def _inspected(said: Mapping[str, Any], network: str) -> Inspected:
    state = said["State"]
    networks = said.get("NetworkSettings", {}).get("Networks") or {}
    return Inspected(
        running=bool(state.get("Running")),
        address=(networks.get(network) or {}).get("IPAddress", ""),
        why=_why(state),
    )


def _why(state: Mapping[str, Any]) -> str:
    if state.get("OOMKilled"):
        return "was killed: it took more memory than it may"
    return ended_with(str(state.get("ExitCode", "")), state.get("Error", ""))


def ended_with(status: str, error: str = "") -> str:
    """How a container ended, in words."""
    code = int(status) if status.isdecimal() else 0
    signal_number = code - 128
    if signal_number in {9, 15}:
        said = f"was ended by {'SIGKILL' if signal_number == 9 else 'SIGTERM'}"  # noqa: PLR2004
    else:
        said = f"exited with {status or 'no status'}"
    return f"{said}: {error}" if error else said


def _taken(said: Mapping[str, Any]) -> Taken:
    memory = said.get("memory_stats") or {}
    details = memory.get("stats") or {}
    # The file cache is given back when somebody needs it: both versions of cgroups.
    cached = details.get("total_inactive_file", details.get("inactive_file", 0))
    total = ((said.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage", 0)
    return Taken(total / _NS, max(0, memory.get("usage", 0) - cached))


def _has_tag(name: str) -> bool:
    return ":" in name.rpartition("/")[2]
