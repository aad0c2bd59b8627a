"""The stack's own etcd, which is restarted when it ends or freezes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from logging import Logger
from pathlib import Path

from common.liveness import Answers, LivenessTimes
from common.time_limits import time_limit
from gpufaas.errors import EtcdFailed, PortTaken
from gpufaas.etcd.own_password import http_answer
from gpufaas.etcd.own_server import LOG_NAME, etcd_server
from gpufaas.local.held_ports import HeldPort
from gpufaas.local.log_files import keep_short
from gpufaas.stack.process_end import until_ended

# An etcd that does not start, or ends right after its start, is tried again after this time.
_PAUSE_S = 1.0
_STABLE_S = 10.0
_ASK_S = 2.0
_PORTS = 3  # that are tried


@asynccontextmanager
async def kept_etcd(
    data: Path,
    port: int,
    log: Logger,
) -> AsyncIterator[None]:
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
                await exits.enter_async_context(kept_etcd(data, port.number, log))
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
                why = await until_ended(process, _answers_at(port), LivenessTimes(), process.kill)
            log.warning("etcd %s; it is started again; its log is %s", why, data / LOG_NAME)
        except EtcdFailed as error:
            if not up.done():
                raise
            log.warning("%s; it is started once more", error)
        if loop.time() - began_s < _STABLE_S:
            await asyncio.sleep(_PAUSE_S)


def _answers_at(port: int) -> Answers:
    """Whether the etcd on this port answers at all, healthy or not."""

    async def answers() -> bool:
        try:
            async with time_limit(_ASK_S):
                return bool(await http_answer(port, "GET", "/health"))
        except TimeoutError:
            return False

    return answers
