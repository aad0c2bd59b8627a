"""Images: found on the Engine, or pulled, several asking for one at once."""

import asyncio
import logging
from pathlib import Path

from gateway_ext.errors import BadDeployment, ProviderFailed
from gateway_ext.providers.docker.engine import Engine, Image
from gateway_ext.providers.docker.registries import credentials_for
from gateway_ext.providers.docker.transport import EngineRefused

log = logging.getLogger(__name__)

_NOT_THERE = 404


class Images:
    """Who wants an image asks here; `pull` is `missing`, `always` or `never`."""

    def __init__(self, engine: Engine, pull: str, registries: Path | None) -> None:
        self._engine = engine
        self._pull = pull
        self._registries = registries
        self._pulling: dict[str, asyncio.Task[Image]] = {}

    async def within(self, name: str, within_s: float) -> Image | None:
        """The image; None where it is still on its way after this time."""
        task = self._asked(name)
        done, _ = await asyncio.wait([task], timeout=within_s)
        return task.result() if done else None

    async def ready(self, name: str) -> Image:
        """The image, however long it takes; an error says why there is none."""
        return await asyncio.shield(self._asked(name))

    async def kept(self, image: Image, name: str) -> Image:
        """The same image as before where it is still there, else that of this name."""
        return await self._engine.image(image.id) or await self.ready(name)

    async def close(self) -> None:
        """Pull nothing any more."""
        tasks = list(self._pulling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _asked(self, name: str) -> asyncio.Task[Image]:
        task = self._pulling.get(name)
        if task is None:
            task = self._pulling[name] = asyncio.create_task(self._get(name))
            task.add_done_callback(lambda done: self._got(name, done))
        return task

    def _got(self, name: str, task: asyncio.Task[Image]) -> None:
        del self._pulling[name]
        if not task.cancelled():
            task.exception()  # it is told to those who asked, if they still wait

    async def _get(self, name: str) -> Image:
        present = await self._engine.image(name)
        if present is not None and self._pull != "always":
            return present
        if self._pull == "never":
            raise BadDeployment(f"image {name} is not on the Engine, and none is to be pulled")
        try:
            await self._engine.pull(name, await self._credentials(name))
        except EngineRefused as refused:
            if present is None:
                raise _told(name, refused) from refused
            log.warning("image %s: the one that is there is used: %s", name, refused)
            return present
        found = await self._engine.image(name)
        if found is None:
            raise ProviderFailed(f"image {name} was pulled, and is not there")
        return found

    async def _credentials(self, name: str) -> str:
        if self._registries is None:
            return ""
        usual = await self._engine.usual_registry()
        return await asyncio.to_thread(credentials_for, name, self._registries, usual)


def _told(name: str, refused: EngineRefused) -> BadDeployment | ProviderFailed:
    """What is wrong with the name or our rights is the caller's to mend, a registry away is not."""
    text = f"image {name} cannot be pulled: {refused.message}"
    words = ("denied", "not found", "unauthorized", "no basic auth", "manifest unknown")
    if refused.status == _NOT_THERE or any(word in refused.message.lower() for word in words):
        return BadDeployment(text)
    return ProviderFailed(text)
