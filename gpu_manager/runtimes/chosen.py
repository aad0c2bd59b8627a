"""The runtimes of a node side by side: each model is hosted as its function's deployment wishes."""

from common.gpu_wishes import PROCESS, STREAM
from gpu_manager.runtimes.process import ProcessRuntime
from gpu_manager.runtimes.runtime import HostedModel, LoadOrder
from gpu_manager.runtimes.stream import ProcessBreaks, StreamRuntime


class ChosenRuntime:
    """Hosts models alone (`process`) or with the other models of their tenant (`stream`)."""

    def __init__(
        self, alone: ProcessRuntime, usual: str = PROCESS, breaks: ProcessBreaks | None = None
    ) -> None:
        """`usual` is the runtime of models without a wish; `breaks` counts who broke processes."""
        self.alone = alone
        self.streams = StreamRuntime(alone, breaks)
        self._usual = usual

    def prepare(self) -> None:
        self.alone.prepare()

    def hosting(self, wish: str, model: str) -> str:
        wanted = wish or self._usual
        if wanted == STREAM and self.alone.can_share and not self.streams.hosts_alone(model):
            return STREAM
        return PROCESS

    async def load(self, order: LoadOrder) -> HostedModel:
        runtime = self.streams if order.runtime == STREAM else self.alone
        return await runtime.load(order)

    async def close(self) -> None:
        await self.alone.close()
