"""A process with a gateway whose functions live elsewhere, for tests that kill it.

`python -m tests.kit.processes.workflow_process STATE_DIR QUEUE NAME=ADDRESS...` deploys a function
for each address, prints the gateway's URL, and runs until it is killed. QUEUE is `sqlite`, or the
URL of a nats-server.
"""

import asyncio
import sys
from pathlib import Path

from gateway_ext.gateway import Gateway
from gateway_ext.model import Deployment, Endpoint, FunctionId
from gateway_ext.settings import GatewaySettings
from tests.kit.fakes.memory_provider import MemoryProvider

_MOST_S = 3600.0  # the test that started this process has the deadline
# More than the tests send at a time: all of them are under way at once.
_CONCURRENCY = 2_000


class Elsewhere:
    """An instance that this process did not start."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    async def close(self) -> None:
        """Leave it."""


async def _main(state_dir: Path, queue: str, addresses: dict[str, str]) -> None:
    async def start(deployment: Deployment, instance: str) -> Elsewhere:
        return Elsewhere(Endpoint(instance, addresses[deployment.id.name]))

    provider = MemoryProvider(start)
    settings = GatewaySettings(
        listen="127.0.0.1:0",
        state_dir=str(state_dir),
        auth=False,
        async_concurrency=_CONCURRENCY,
        queue=queue,
    )
    async with Gateway(settings, provider) as gateway:
        for name in addresses:
            id_ = FunctionId("openfaas-fn", name)
            await provider.deploy(Deployment(id_, "i"), update=False)
        print(gateway.url, flush=True)  # noqa: T201 - this is what the test reads
        await asyncio.sleep(_MOST_S)


if __name__ == "__main__":
    functions = dict(each.split("=", 1) for each in sys.argv[3:])
    asyncio.run(_main(Path(sys.argv[1]), sys.argv[2], functions))
