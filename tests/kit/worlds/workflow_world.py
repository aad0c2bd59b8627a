"""A gateway with functions that answer as a test says, and workflows of them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway_ext.model import Deployment
from tests.kit.fakes.fake_function import Behaviour, FakeFunction, Got, a_function, says
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.worlds.gateway_world import Said, World, gateway_world

JSON = "content-type: application/json\r\n"


@dataclass(slots=True)
class WorkflowWorld:
    """One gateway; `got` has what each function was sent."""

    world: World
    got: dict[str, list[Got]] = field(default_factory=dict)

    async def deploy(self, stages: str, head: str = "workflow: w", method: str = "POST") -> Said:
        """Deploy the workflow `w` with these stages."""
        text = f"{head}\nstages:\n{stages}".encode()
        return await self.world.ask(method, "/system/workflows", text)

    async def call(self, body: bytes = b"{}", path: str = "/workflow/w", **more: Any) -> Said:
        """Call the workflow, as anybody may."""
        return await self.world.ask("POST", path, body, who="", **more)

    async def runs(self) -> list[dict[str, Any]]:
        """The last runs, the latest first."""
        found: list[dict[str, Any]] = (await self.world.get("/system/workflow/w/runs")).body["runs"]
        return found

    def bodies(self, function: str) -> list[bytes]:
        """What a function was sent."""
        return [one.body for one in self.got[function]]


def says_json(
    text: bytes, status: int = 200, headers: str = "", *, delay_s: float = 0.0
) -> Behaviour:
    """Answers so, and says that it is JSON."""
    return says(text, status, JSON + headers, delay_s=delay_s)


@asynccontextmanager
async def workflow_world(
    folder: Path, behaviours: Mapping[str, Behaviour], **more: Any
) -> AsyncIterator[WorkflowWorld]:
    """A gateway with a function for each behaviour."""
    found: dict[str, list[Got]] = {name: [] for name in behaviours}
    async with AsyncExitStack() as exits:

        async def start(deployment: Deployment, name: str) -> FakeFunction:
            function = deployment.id.name
            one = await exits.enter_async_context(a_function(behaviours[function], name))
            one.got = found[function]
            return one

        world = await exits.enter_async_context(
            gateway_world(folder, MemoryProvider(start), **more)
        )
        for name in behaviours:
            said = await world.deploy(name)  # also where Python leaves assertions out
            assert said.status == 202
        yield WorkflowWorld(world, found)
