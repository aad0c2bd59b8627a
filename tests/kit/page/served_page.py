"""The page of a generated cluster, served by a thread of this process."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from gateway_ext.ui.routes import PagePace
from tests.kit.page.generated_cluster import GeneratedCluster
from tests.kit.page.page_world import page_world

PATIENCE_S = 20.0
# Often, so that tests need not wait; what that costs is measured elsewhere.
_PACE = PagePace(every_s=0.1, most_share=1.0)


@contextlib.contextmanager
def served(cluster: GeneratedCluster, *, port: int = 0, pace: PagePace = _PACE) -> Iterator[str]:
    """Serve the page for as long as the context lasts; its address."""
    address: Future[str] = Future()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        try:
            async with page_world(cluster, port=port, pace=pace) as world:
                address.set_result(f"{world.url}/ui/")
                await over.wait()
        except OSError as error:
            if address.done():
                raise
            address.set_exception(error)

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=run, name="page world")
    thread.start()
    try:
        yield address.result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server has not ended"


def calm(gpus: int = 4, functions: int = 8) -> GeneratedCluster:
    """A cluster without calls, whose state does not change."""
    cluster = GeneratedCluster(gpus, functions)
    cluster.rate = 0.0
    cluster.queue.clear()
    for gpu in cluster.gpus.values():
        gpu.running = None
    return cluster
