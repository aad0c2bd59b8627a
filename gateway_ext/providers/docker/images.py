"""Images: found on the Engine or pulled; requests for the same image share one pull."""

import asyncio
import base64
import json
import logging
from pathlib import Path
from urllib.parse import urlsplit

from common.tasks import error_of
from gateway_ext.errors import BadDeployment, ProviderFailed
from gateway_ext.providers.docker.engine import EngineClient, EngineImage
from gateway_ext.providers.http_api import ServerRefused

log = logging.getLogger(__name__)

_NOT_THERE = 404


class ImagePulls:
    """Provides images; `pull` is `missing`, `always` or `never`."""

    def __init__(self, engine: EngineClient, pull: str, registries: Path | None) -> None:
        self._engine = engine
        self._pull = pull
        self._registries = registries
        self._pulling: dict[str, asyncio.Task[EngineImage]] = {}

    async def within(self, name: str, within_s: float) -> EngineImage | None:
        """The image; None if it is not there after `within_s`; the pull then continues."""
        task = self._task_of(name)
        done, _ = await asyncio.wait([task], timeout=within_s)
        return task.result() if done else None

    async def ready(self, name: str) -> EngineImage:
        """The image, however long the pull takes."""
        return await asyncio.shield(self._task_of(name))

    async def close(self) -> None:
        tasks = list(self._pulling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _task_of(self, name: str) -> asyncio.Task[EngineImage]:
        task = self._pulling.get(name)
        if task is None:
            task = self._pulling[name] = asyncio.create_task(self._get(name))
            task.add_done_callback(lambda done: self._finished(name, done))
        return task

    def _finished(self, name: str, task: asyncio.Task[EngineImage]) -> None:
        del self._pulling[name]
        error_of(task)  # marks it as retrieved: the waiting callers get it, if any is left

    async def _get(self, name: str) -> EngineImage:
        present = await self._engine.image(name)
        if present is not None and self._pull != "always":
            return present
        if self._pull == "never":
            raise BadDeployment(f"image {name} is not on the Engine, and none is to be pulled")
        try:
            await self._engine.pull(name, await self._credentials(name))
        except ServerRefused as refused:
            if present is None:
                raise _pull_error(name, refused) from refused
            log.warning("image %s: the one on the Engine is used: %s", name, refused)
            return present
        image = await self._engine.image(name)
        if image is None:
            raise ProviderFailed(f"image {name} was pulled, and is not there")
        return image

    async def _credentials(self, name: str) -> str:
        if self._registries is None:
            return ""
        usual = await self._engine.usual_registry()
        return await asyncio.to_thread(credentials_for, name, self._registries, usual)


def _pull_error(name: str, refused: ServerRefused) -> BadDeployment | ProviderFailed:
    """BadDeployment if the name or the credentials are wrong, ProviderFailed otherwise."""
    text = f"image {name} cannot be pulled: {refused.message}"
    words = ("denied", "not found", "unauthorized", "no basic auth", "manifest unknown")
    if refused.status == _NOT_THERE or any(word in refused.message.lower() for word in words):
        return BadDeployment(text)
    return ProviderFailed(text)


def credentials_for(image: str, config: Path, usual: str) -> str:
    """The header X-Registry-Auth for pulling an image; empty if there are no credentials for it.

    `usual` is the registry of images whose name has no registry, as the file calls it.
    """
    registry = _registry_of(image, usual)
    auths = _known(config)
    for name in (registry, f"https://{registry}", f"https://{registry}/v1/"):
        if name in auths:
            return _header(name, auths[name], config)
    return ""


def _registry_of(image: str, usual: str) -> str:
    first, slash, _ = image.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        return usual
    host = urlsplit(usual).hostname or ""
    return usual if first in {host, host.removeprefix("index.")} else first


def _known(config: Path) -> dict[str, object]:
    """Read for every pull, as `docker login` may have changed the file."""
    try:
        auths = json.loads(config.read_bytes()).get("auths") or {}
        return dict(auths)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ProviderFailed(f"the registries' credentials in {config}: {error}") from error


def _header(registry: str, entry: object, config: Path) -> str:
    if not isinstance(entry, dict):
        raise ProviderFailed(f"the credentials of {registry} in {config} are not an object")
    if entry.get("identitytoken"):
        auth = {"identitytoken": entry["identitytoken"]}
    elif entry.get("auth"):
        auth = _user_and_password(registry, str(entry["auth"]), config)
    else:
        raise ProviderFailed(
            f"{config} keeps the credentials of {registry} in a credential store, which this"
            " gateway cannot ask; write them as `auth`"
        )
    text = json.dumps({**auth, "serveraddress": registry})
    return base64.urlsafe_b64encode(text.encode()).decode()


def _user_and_password(registry: str, auth: str, config: Path) -> dict[str, str]:
    try:
        user, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except ValueError as error:  # no base64, or no UTF-8 in it
        raise ProviderFailed(f"the credentials of {registry} in {config}: {error}") from error
    if not colon:
        raise ProviderFailed(f"the credentials of {registry} in {config} have no password")
    return {"username": user, "password": password.rstrip("\0")}
