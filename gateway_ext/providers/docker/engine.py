"""The Docker Engine's HTTP API: requests with typed answers, and the lines of its streams."""

import asyncio
import contextlib
import json
import logging
import re
import signal
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from common.liveness import signal_name
from common.numerals import natural
from common.time_limits import time_limit
from gateway_ext.errors import BadRequest, ProviderFailed
from gateway_ext.providers.http_api import (
    BAD,
    CONNECT_S,
    PassingOver,
    ServerAway,
    ServerRefused,
    lines,
    refusal,
    translated,
)
from gateway_ext.providers.managed.function import InstanceUsage
from gateway_ext.providers.managed.replicas import exited_with

log = logging.getLogger(__name__)

OURS = "com.gpufaas.gateway"
FUNCTION = "com.gpufaas.function"
RELEASE = "com.gpufaas.release"
TEMPLATE = "com.gpufaas.template"
_FORBIDDEN, _GONE, _CONFLICT = 403, 404, 409
# Docker 20.10 supports 1.41; 1.47 is the newest version that was tested.
_OLDEST, _NEWEST = (1, 41), (1, 47)
_ANSWER_S, _PULL_BEGINS_S, _SLACK_S = 60.0, 120.0, 30.0
_CHUNK, _LONGEST_LINE_BYTES, _LONGEST_MESSAGE = 1 << 16, 1 << 20, 1000
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


class EngineClient:
    """One Engine, connected to as needed; lists what is labelled with the name of this gateway.

    The folder `tls` holds ca.pem, cert.pem and key.pem, as DOCKER_CERT_PATH does. A pull fails when
    the Engine reports no progress for `pull_quiet_s`.
    """

    def __init__(
        self, url: str, gateway: str, tls: Path | None = None, pull_quiet_s: float = 600.0
    ) -> None:
        self.url = url
        # They mark containers, volumes and networks as this gateway's.
        self.labels: Mapping[str, str] = {OURS: gateway}
        self._label = [f"{OURS}={gateway}"]
        self._filter = {"filters": json.dumps({"label": self._label})}
        self._base, self._socket = _parsed(url, private=tls is not None)
        self._tls = tls
        self._pull_quiet_s = pull_quiet_s
        self._session: aiohttp.ClientSession | None = None
        self._version = ""

    def open(self) -> None:
        """Needs a running event loop."""
        connector: aiohttp.BaseConnector
        if self._socket:
            connector = aiohttp.UnixConnector(self._socket, limit=0)
        else:
            connector = aiohttp.TCPConnector(
                limit=0, ssl=_secured(self._tls) if self._tls else True
            )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECT_S),
            auto_decompress=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # -- containers -----------------------------------------------------------------------------

    async def containers(self) -> list[ListedContainer]:
        containers = await self.call("GET", "/containers/json", {"all": "1", **self._filter})
        return [_container(container) for container in containers]

    async def create(self, name: str, body: Mapping[str, object]) -> None:
        """Create a container without starting it."""
        await self.call("POST", "/containers/create", {"name": name}, body)

    async def start(self, name: str) -> None:
        """Nothing happens if the container runs already."""
        await self.call("POST", f"/containers/{name}/start")

    async def stop(self, name: str, within_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `within_s`; returns when the container has ended."""
        query = {"t": str(round(within_s))}
        await self.call(*("POST", f"/containers/{name}/stop", query), within_s=within_s + _SLACK_S)

    async def kill(self, name: str) -> None:
        await self.call("POST", f"/containers/{name}/kill")

    async def remove(self, name: str) -> None:
        """Remove a container and its anonymous volumes, running or not; none is fine too."""
        with PassingOver(_GONE, _CONFLICT):  # a conflict: it is being removed already
            await self.call("DELETE", f"/containers/{name}", {"force": "1", "v": "1"})

    async def inspect(self, name: str, network: str) -> ContainerState | None:
        """None if there is none of this name."""
        container = await self._found(f"/containers/{name}/json")
        return None if container is None else _inspected(container, network)

    async def put(self, name: str, folder: str, archive: bytes) -> None:
        """Unpack a tar archive in a folder of a container."""
        await self.call("PUT", f"/containers/{name}/archive", {"path": folder}, archive)

    async def usage(self, name: str) -> InstanceUsage:
        """Resources of a container; zero if it has ended."""
        query, stats = {"stream": "0", "one-shot": "1"}, {}
        with PassingOver(_GONE, _CONFLICT):
            stats = await self.call("GET", f"/containers/{name}/stats", query)
        return _usage(stats)

    # -- images ---------------------------------------------------------------------------------

    async def image(self, name: str) -> EngineImage | None:
        """None if it is not on the Engine."""
        image = await self._found(f"/images/{name}/json")
        if image is None:
            return None
        labels = (image.get("Config") or {}).get("Labels") or {}
        return EngineImage(image["Id"], TEMPLATE in labels)

    async def pull(self, name: str, credentials: str) -> None:
        """Pull an image from its registry; ServerRefused has the reason of a failure."""
        headers = {"X-Registry-Auth": credentials} if credentials else {}
        has_tag = ":" in name.rpartition("/")[2]
        query = {"fromImage": name if has_tag else f"{name}:latest"}
        begun = self._stream(
            *("POST", "/images/create", query), headers=headers, within_s=_PULL_BEGINS_S
        )
        async with begun as content, _progress_within(self._pull_quiet_s) as until:
            async for step in json_objects(content):
                if "error" in step:
                    raise ServerRefused(0, str(step["error"]).strip())
                until.reschedule(asyncio.get_running_loop().time() + self._pull_quiet_s)

    async def usual_registry(self) -> str:
        """The registry of images whose name has no registry, as `docker login` calls it."""
        return str((await self.call("GET", "/info")).get("IndexServerAddress", ""))

    async def cores(self) -> int:
        return max(1, int((await self.call("GET", "/info")).get("NCPU", 1)))

    # -- networks and volumes -------------------------------------------------------------------

    async def has_network(self, name: str) -> bool:
        return await self._found(f"/networks/{name}") is not None

    async def remove_network(self, name: str) -> None:
        """Remove a network, if this gateway made it and no container is in it."""
        network = await self._found(f"/networks/{name}")
        if network is None or not (self.labels.items() <= (network.get("Labels") or {}).items()):
            return
        with PassingOver(_GONE, _FORBIDDEN, _CONFLICT):
            await self.call("DELETE", f"/networks/{name}")

    async def make_network(self, body: Mapping[str, object]) -> None:
        """Nothing happens if one of its name was made meanwhile."""
        with PassingOver(_CONFLICT):
            await self.call("POST", "/networks/create", None, {**body, "CheckDuplicate": True})

    async def volumes(self) -> Mapping[str, Mapping[str, str]]:
        """Names and labels of this gateway's volumes."""
        answer = await self.call("GET", "/volumes", self._filter)
        return {one["Name"]: one.get("Labels") or {} for one in answer.get("Volumes") or ()}

    async def has_volume(self, name: str) -> bool:
        return await self._found(f"/volumes/{name}") is not None

    async def make_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Nothing happens if it exists."""
        await self.call("POST", "/volumes/create", None, {"Name": name, "Labels": dict(labels)})

    async def remove_volume(self, name: str) -> None:
        """Delete a volume, unless a container still has it."""
        with PassingOver(_GONE, _CONFLICT):
            await self.call("DELETE", f"/volumes/{name}")

    # -- streams --------------------------------------------------------------------------------

    async def endings(self, listening: asyncio.Event) -> AsyncGenerator[tuple[str, str], None]:
        """Names and exit codes of this gateway's containers that end after `listening` is set."""
        filters = {"type": ["container"], "event": ["die"], "label": self._label}
        query = {"filters": json.dumps(filters)}
        async with self._stream("GET", "/events", query) as content:
            listening.set()
            async for event in json_objects(content):
                actor = event.get("Actor", {}).get("Attributes", {})
                yield actor.get("name", ""), actor.get("exitCode", "")

    async def output(self, name: str, since: datetime | None) -> AsyncGenerator[bytes, None]:
        """Yield the output of a container since then, in frames, until it ends."""
        query = {"follow": "1", "stdout": "1", "stderr": "1", "timestamps": "1"}
        if since is not None:
            query["since"] = f"{since.timestamp():.6f}"
        async with self._stream("GET", f"/containers/{name}/logs", query) as content:
            async for data in content.iter_chunked(_CHUNK):
                yield data

    async def _found(self, path: str) -> dict[str, Any] | None:
        with PassingOver(_GONE):
            return dict(await self.call("GET", path))
        return None

    # -- the connection -------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        within_s: float = _ANSWER_S,
    ) -> Any:
        """The answer, read as JSON; None if it is empty."""
        async with (
            self._stream(method, path, query, body, within_s=within_s) as content,
            time_limit(within_s),
        ):
            text = await content.read()
        try:
            return json.loads(text) if text.strip() else None
        except (ValueError, RecursionError) as error:
            raise ProviderFailed(f"the Docker Engine at {self.url} does not answer JSON") from error

    @contextlib.asynccontextmanager
    async def _stream(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        within_s: float = _ANSWER_S,
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of the answer as it arrives; `within_s` bounds the time until it begins."""
        version = self._version
        if not version:
            async with self._answer("GET", "/_ping", within_s) as answer:
                version = self._negotiated(answer.headers.get("API-Version", ""))
            self._version = version
        if isinstance(body, bytes):
            headers = {"Content-Type": "application/x-tar"}
            sent: dict[str, Any] = {"data": body}
        else:
            sent = {"json": body}
        path = f"/v{version}{path}"
        async with self._answer(
            method, path, within_s, params=query, headers=headers, **sent
        ) as answer:
            yield answer.content

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, within_s: float, **sent: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "opened before"
        with translated(self.away, f"no answer within {within_s:g} s"):
            async with contextlib.AsyncExitStack() as exits:
                request = self._session.request(method, f"{self._base}{path}", **sent)
                async with time_limit(within_s):
                    answer = await exits.enter_async_context(request)
                    if answer.status >= BAD:
                        raise ServerRefused(answer.status, _message(await refusal(answer)))
                yield answer

    def _negotiated(self, version: str) -> str:
        """The version to ask in, of an Engine whose newest one is this."""
        try:
            theirs = tuple(int(part) for part in version.split("."))
        except ValueError:
            raise ProviderFailed(f"{self.url} is no Docker Engine: it names no version") from None
        if theirs < _OLDEST:
            least = ".".join(map(str, _OLDEST))
            raise ProviderFailed(
                f"the Docker Engine at {self.url} speaks {version} of its API;"
                f" {least} (Docker 20.10) is the least that is needed"
            )
        return ".".join(map(str, min(theirs, _NEWEST)))

    def away(self, why: str) -> ServerAway:
        """The error of an Engine that cannot be reached."""
        self._version = ""  # it may come back as another release
        return ServerAway(f"the Docker Engine at {self.url} cannot be reached: {why}")


def _secured(folder: Path) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=folder / "ca.pem")
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    except OSError as error:
        raise BadRequest(f"docker_tls_dir: {folder}: {error}") from error
    return context


def _parsed(url: str, *, private: bool) -> tuple[str, str]:
    """The base URL of requests, and the path of the socket if there is one."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return "http://docker", parts.path
    if parts.scheme == "tcp" and parts.netloc and parts.path in {"", "/"}:
        return f"{'https' if private else 'http'}://{parts.netloc}", ""
    raise BadRequest(f"docker_url: {url!r}: unix:///path or tcp://host:port is expected")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"]).strip()[:_LONGEST_MESSAGE]
    except (ValueError, TypeError, KeyError, RecursionError):
        return body.decode(errors="replace").strip()[:_LONGEST_MESSAGE] or "no reason given"


@contextlib.asynccontextmanager
async def _progress_within(quiet_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Raise ServerRefused after `quiet_s`, unless the time-out is rescheduled before."""
    try:
        async with time_limit(quiet_s) as until:
            yield until
    except TimeoutError as error:
        raise ServerRefused(0, f"no progress for {quiet_s:g} s") from error


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
    code = natural(status) or 0
    signal_number = code - 128
    if signal_number in _ENDING:
        text = f"was ended by {signal_name(signal_number)}"
    else:
        text = exited_with(status or "unknown")
    return f"{text}: {error}" if error else text


def _usage(answer: Mapping[str, Any]) -> InstanceUsage:
    memory = answer.get("memory_stats") or {}
    details = memory.get("stats") or {}
    # Without the file cache, which the kernel frees under pressure; cgroups v1 and v2 differ.
    cached = details.get("total_inactive_file", details.get("inactive_file", 0))
    total = ((answer.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage", 0)
    return InstanceUsage(total / _NS, max(0, memory.get("usage", 0) - cached))


async def json_objects(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the object of each line; a line above _LONGEST_LINE_BYTES is passed over."""
    async with contextlib.aclosing(lines(content, _LONGEST_LINE_BYTES, _note_long_line)) as read:
        async for line in read:
            if line.strip():
                yield _object(line)


def _note_long_line() -> None:
    text = "a line of the Docker Engine is skipped: it has more than %d bytes"
    log.warning(text, _LONGEST_LINE_BYTES)


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProviderFailed("the Docker Engine sends a line that is no JSON") from error
    if not isinstance(value, dict):
        raise ProviderFailed("the Docker Engine sends a line that is no JSON object")
    return value


_HEADER = 8
# Of one entry: the Engine's own are of 16 KiB. The content of a larger one is dropped as it comes.
_MOST_ENTRY_BYTES = 1 << 20
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?Z ")


class OutputLine(NamedTuple):
    """One line of standard output or standard error."""

    at: datetime
    text: str


class OutputFrames:
    """A decoder: output and errors are frames of one stream, whose headers name which it is.

    The Engine splits lines at 16 KiB; they are joined again up to `longest_bytes`.
    """

    def __init__(self, longest_bytes: int) -> None:
        self._longest_bytes = longest_bytes
        self._rest = b""
        self._dropped_bytes = 0  # that are still to come of an entry that is too large
        self._begun: dict[int, tuple[datetime, bytes]] = {}

    def feed(self, data: bytes) -> list[OutputLine]:
        """The lines that are complete with this data."""
        self._rest += data
        lines: list[OutputLine] = []
        at = self._drop(0)
        while len(self._rest) - at >= _HEADER:
            size = int.from_bytes(self._rest[at + 4 : at + _HEADER], "big")
            end = at + _HEADER + size
            if size > _MOST_ENTRY_BYTES:
                self._dropped_bytes = size
                at = self._drop(at + _HEADER)
                continue
            if len(self._rest) < end:
                break
            lines += self._entry_lines(self._rest[at], self._rest[at + _HEADER : end])
            at = end
        self._rest = self._rest[at:]
        return lines

    def end(self) -> list[OutputLine]:
        """The incomplete lines at the end of the stream."""
        lines = [_line(at, text) for at, text in self._begun.values()]
        self._begun.clear()
        return lines

    def _drop(self, at: int) -> int:
        """Where what follows an entry that is too large begins, as far as it has come."""
        count = min(self._dropped_bytes, len(self._rest) - at)
        self._dropped_bytes -= count
        return at + count

    def _entry_lines(self, stream: int, entry: bytes) -> list[OutputLine]:
        match = _TIME.match(entry)
        time = None if match is None else _time(match)
        if match is None or time is None:
            return []  # no log driver writes an entry without a time
        at, text = self._begun.pop(stream, (time, b""))
        text += entry[match.end() :]
        if text.endswith(b"\n") or len(text) >= self._longest_bytes:
            return [_line(at, text[: self._longest_bytes])]
        self._begun[stream] = (at, text)
        return []


def _line(at: datetime, text: bytes) -> OutputLine:
    return OutputLine(at, text.decode(errors="replace").rstrip("\r\n"))


def _time(match: re.Match[bytes]) -> datetime | None:
    micros = int((match[2] or b"0")[:6].ljust(6, b"0"))
    try:
        at = datetime.fromisoformat(match[1].decode())
    except ValueError:  # a month of 99 days
        return None
    return at.replace(microsecond=micros, tzinfo=UTC)
