"""A function of a managed provider, and an instance of it, without processes."""

import asyncio

from gateway_ext.model import Deployment, Endpoint, FunctionId

F = FunctionId("n", "f")
DEPLOYMENT = Deployment(F, "reg/f:1")


class MortalInstance:
    """An instance that is ready at once, and dies of itself after a time."""

    name = "f-1"
    endpoint = Endpoint("f-1", "unix:/nowhere")

    def __init__(self, lives_s: float) -> None:
        self.ready = True
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(lives_s, self.kill, "died")

    async def collect_output(self) -> None:
        await asyncio.shield(self.exited)

    async def until_ready(self, within_s: float) -> bool:
        del within_s
        return self.ready

    async def stop(self, within_s: float) -> None:
        del within_s
        self.kill("was stopped")

    def kill(self, why: str) -> None:
        if not self.exited.done():
            self.exited.set_result(why)


class StillOwner:
    """A function with one replica, or none."""

    deployment = DEPLOYMENT
    template_trouble = ""

    def __init__(self) -> None:
        self.wanted = 1

    def note(self, text: str) -> None:
        del text

    def took_over(self, version: object) -> None:
        del version

    def instances_ended(self, version: object) -> None:
        del version
