"""The page's real routes over a cluster that is made up: for browsers, and for those who write it.

`python -m tests.page_world --gpus 200 --functions 1000` serves it until Ctrl-C.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway_ext.app import Parts, Readiness, make_app
from gateway_ext.asgi import Receive, Scope, Send, say
from gateway_ext.auth import Auth, Credentials
from gateway_ext.serving import listen, serving
from gateway_ext.system_meters import SystemMeters
from gateway_ext.ui.feed import Feed, FeedPace
from gateway_ext.ui.files import STATIC, Files
from gateway_ext.ui.routes import make_page
from gateway_ext.ui.series import Series
from gateway_ext.ui.source import Source
from tests.generated_cluster import GeneratedCluster

USER, PASSWORD = "admin", "a password of the tests"
CREDENTIALS = Credentials(USER, PASSWORD)


@dataclass(frozen=True, slots=True)
class PageWorld:
    """Where the page is, and who serves it."""

    url: str
    feed: Feed


@asynccontextmanager
async def page_world(
    source: Source,
    *,
    port: int = 0,
    pace: FeedPace | None = None,
    static: Path = STATIC,
    auth: bool = True,
) -> AsyncIterator[PageWorld]:
    """The page at `url` + /ui/, for as long as the context lasts."""
    listener = listen("127.0.0.1", port)
    async with Feed(source, pace, series=_series(source)) as feed:
        parts = Parts(
            invoke=_nothing,
            system=_nothing,
            logs=_nothing,
            auth=Auth(CREDENTIALS) if auth else None,
            readiness=lambda: Readiness(True, "ready\n"),
            metrics=bytes,
            system_meters=SystemMeters(),
            page=make_page(feed, source, Files(static)),
        )
        async with serving(make_app(parts), listener, 1.0):
            try:
                yield PageWorld(f"http://127.0.0.1:{listener.getsockname()[1]}", feed)
            finally:
                feed.close()


def _series(source: Source) -> Series:
    """With a past, where the cluster can make one up."""
    series = Series()
    if isinstance(source, GeneratedCluster):
        past = source.past(100)
        for number, point in enumerate(past):
            series.add(point, time.monotonic() - (len(past) - number) * series.step_s)
    return series


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    del receive
    await say(send, 404, f"nothing is at {scope['path']}")


async def _serve(options: argparse.Namespace) -> None:
    cluster = GeneratedCluster(options.gpus, options.functions)
    async with page_world(cluster, port=options.port, auth=not options.open) as world:
        print(f"{world.url}/ui/  user {USER}, password {PASSWORD!r}", flush=True)  # noqa: T201
        await asyncio.Event().wait()


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=6)
    parser.add_argument("--functions", type=int, default=12)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--open", action="store_true", help="ask for no password")
    options = parser.parse_args()
    try:
        asyncio.run(_serve(options))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
