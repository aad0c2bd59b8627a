"""The page's real routes over a generated cluster, for browsers and for work on the page.

`python -m tests.kit.page.page_world --gpus 200 --functions 1000` serves it until Ctrl-C.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from common.http.asgi import Receive, Scope, Send, send_response, send_text
from common.http.server import listen, serving
from gateway_ext.gateway import GatewayApp
from gateway_ext.metrics import ApiMeters
from gateway_ext.openfaas.basic_auth import Auth, BasicCredentials
from gateway_ext.ui.cluster_source import PageSource
from gateway_ext.ui.routes import STATIC, PagePace, WatcherFeed, make_page
from gateway_ext.ui.state import Series
from tests.kit.page.generated_cluster import GeneratedCluster

USER, PASSWORD = "admin", "a password of the tests"
CREDENTIALS = BasicCredentials(USER, PASSWORD)


@dataclass(frozen=True, slots=True)
class PageWorld:
    """The page's URL, and the feed behind it."""

    url: str
    feed: WatcherFeed


@asynccontextmanager
async def page_world(
    cluster: GeneratedCluster,
    *,
    port: int = 0,
    pace: PagePace | None = None,
    static: Path = STATIC,
    auth: bool = True,
) -> AsyncIterator[PageWorld]:
    """The page at `url` + /ui/, for as long as the context lasts."""
    listener = listen("127.0.0.1", port)
    source = cast(PageSource, cluster)
    async with WatcherFeed(source, pace, series=_series(cluster)) as feed:
        app = GatewayApp(
            invoke=_nothing,
            system=_system,
            auth=Auth(CREDENTIALS) if auth else None,
            ready=lambda: True,
            metrics=bytes,
            system_meters=ApiMeters(),
            pages={"ui": make_page(feed, source, static)},
            below_system={"logs": _logs},
        )
        async with serving(app, listener, 1.0):
            try:
                yield PageWorld(f"http://127.0.0.1:{listener.getsockname()[1]}", feed)
            finally:
                feed.close()


def _series(cluster: GeneratedCluster) -> Series:
    """Series with the past that the cluster generates."""
    series = Series()
    past = cluster.past(100)
    for number, point in enumerate(past):
        series.add(point, time.monotonic() - (len(past) - number) * series.step_s)
    return series


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    del receive
    await send_text(send, 404, f"nothing is at {scope['path']}")


async def _logs(scope: Scope, receive: Receive, send: Send) -> None:
    """The log of any function."""
    del scope, receive
    line = {"text": "Traceback (most recent call last):", "instance": "f-1"}
    await send_response(send, 200, json.dumps(line).encode() + b"\n", [])


async def _system(scope: Scope, receive: Receive, send: Send) -> None:
    """What a gateway says of the instances of a function that nobody has deployed."""
    del receive
    name = scope["path"].rpartition("/")[2]
    status = {
        "name": name,
        "usage": {"cpu": 0.0, "totalMemoryBytes": 512 << 20},
        "template": "warm, 411 MiB",
    }
    await send_response(
        send, 200, json.dumps(status).encode(), [(b"content-type", b"application/json")]
    )


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
