"""A worker that a model has left, until it ends or the tenant's next model takes it."""

import asyncio
import logging

from common.liveness import LivenessTimes, until_frozen
from gpu_manager.runtimes.runtime import HostProcess, LoadOrder, Observer
from gpu_manager.runtimes.workers.fork_client import ForkedWorker

log = logging.getLogger(__name__)


class EmptyProcess:
    """A process with a context on a GPU and without a model; it belongs to a tenant for good."""

    def __init__(
        self, left_by: LoadOrder, worker: ForkedWorker, memory_bytes: int, observer: Observer
    ) -> None:
        """`left_by` is the order of the model that has left."""
        self.tenant = left_by.tenant
        self.gpu = left_by.gpu
        self.host = HostProcess(worker.pid)
        self.memory_bytes = memory_bytes
        self._worker = worker
        self._observer = observer
        self._exit_expected = False
        self._watching: asyncio.Task[None] | None = None
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        worker.exited.add_done_callback(self._exit)

    @property
    def closed(self) -> asyncio.Future[str]:
        """Done when the process has ended or has taken a model."""
        return self._closed

    def watch(self, times: LivenessTimes) -> None:
        """Kill the process as soon as it is stopped, from now on until another model takes it."""
        self._watching = asyncio.get_running_loop().create_task(self._watch(times))

    def take(self, model: str) -> ForkedWorker | None:
        """The worker, for this model of its tenant from now on; None if it has ended."""
        if self._closed.done() or self._worker.exited.done():
            return None
        self._worker.exited.remove_done_callback(self._exit)
        self._close(f"{model} has taken it")
        return self._worker

    async def end(self) -> None:
        """Kill the process, and wait for its exit."""
        if self._closed.done():
            return
        self._exit_expected = True
        self._worker.kill("its context is not needed any more")
        await asyncio.shield(self._closed)

    async def _watch(self, times: LivenessTimes) -> None:
        why = await until_frozen(self._worker.pid, None, times)
        self._worker.kill(f"it {why}")

    def _exit(self, _: "asyncio.Future[None]") -> None:
        self._worker.close()
        cause = self._worker.cause or "it ended"
        self._close(cause)
        if not self._exit_expected:
            log.warning("the empty worker %s ended: %s", self._worker.name, cause)
            self._observer.context_lost(self, cause)

    def _close(self, result: str) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None  # a cancelled task refers to all that it worked with
        self._closed.set_result(result)
