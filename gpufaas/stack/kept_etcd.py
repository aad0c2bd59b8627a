"""The stack's own etcd, which is restarted when it ends or freezes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from logging import Logger
from pathlib import Path

from common.liveness import Answers, LivenessTimes
from gpufaas.errors import EtcdFailed
from gpufaas.etcd.own_password import http_answer
from gpufaas.etcd.own_server import etcd_server
from gpufaas.stack.process_end import until_ended

# An etcd that does not start, or ends right after its start, is tried again after this time.
_PAUSE_S = 1.0
_STABLE_S = 10.0
_ASK_S = 2.0


@asynccontextmanager
async def kept_etcd(
    data: Path,
    port: int,
    log: Logger,
    times: LivenessTimes = LivenessTimes(),  # noqa: B008 - it never changes
) -> AsyncIterator[None]:
    """Keep an etcd running on this port; EtcdFailed if it does not start the first time."""
    up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    keeping = asyncio.create_task(_keep(data, port, log, times, up))
    try:
        await asyncio.wait({keeping, up}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _keep(
    data: Path, port: int, log: Logger, times: LivenessTimes, up: "asyncio.Future[None]"
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        try:
            async with etcd_server(data, log, port=port, guarded=True) as server:
                if not up.done():
                    up.set_result(None)
                process = server.process
                why = await until_ended(process, _answers_at(port), times, process.kill)
            log.warning("etcd %s; it is started again; its log is %s", why, data / "etcd.log")
        except EtcdFailed as error:
            if not up.done():
                raise
            log.warning("etcd does not start; once more (%s)", error)
        if loop.time() - began_s < _STABLE_S:
            await asyncio.sleep(_PAUSE_S)


def _answers_at(port: int) -> Answers:
    """Whether the etcd on this port answers at all, healthy or not."""

    async def answers() -> bool:
        try:
            async with asyncio.timeout(_ASK_S):
                return bool(await http_answer(port, "GET", "/health"))
        except TimeoutError:
            return False

    return answers
