"""Which models share a process: a tenant's on one GPU, where their functions wish it."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, MsgspecError

from common.gpu_wishes import PROCESS, STREAM
from gpu_manager.runtimes.hosting_worker import HostingWorker
from gpu_manager.runtimes.process import ProcessRuntime
from gpu_manager.runtimes.runtime import HostedModel, LoadOrder
from torch_shim.errors import WireError

log = logging.getLogger(__name__)


def sharing_processes(alone: ProcessRuntime, usual: str, spill: Path | None) -> "ChosenRuntime":
    """Return a runtime by which models share processes; what they break is kept in this folder."""
    return ChosenRuntime(
        alone, usual, ProcessBreaks(None if spill is None else spill / BREAKS_FILE)
    )


# A model that has broken so many processes of others gets one of its own.
_MOST_BREAKS = 2


BREAKS_FILE = "process-breaks.json"
_FORGOTTEN_S = 24 * 3600.0  # a function may have been mended, and its weights be the same
_MOST_MODELS = 4096
_MOST_CHARACTERS = 512  # of a model's name
_MOST_BYTES = 4 << 20
_Model = Annotated[str, Meta(max_length=_MOST_CHARACTERS)]
_Count = Annotated[int, Meta(ge=1, lt=1 << 32)]
_Counts = Annotated[dict[_Model, tuple[_Count, float]], Meta(max_length=_MOST_MODELS)]
_DECODER: msgspec.json.Decoder[dict[str, tuple[int, float]]] = msgspec.json.Decoder(_Counts)


class ProcessBreaks:
    """How often models broke a process of others; one that broke nothing for a day is forgotten.

    Without a file the counts end with the manager. Managers may share one: the higher count holds.
    """

    def __init__(self, path: Path | None = None, unix_s: Callable[[], float] = time.time) -> None:
        """Read the file, if there is one; what cannot be read counts as nothing."""
        self._path = path
        self._unix_s = unix_s
        self._counts: dict[str, tuple[int, float]] = {}  # and when the last one was
        self._merge()

    def __getitem__(self, model: str) -> int:
        """Return how often this model broke a process lately."""
        count, last_s = self._counts.get(model, (0, 0.0))
        return count if self._unix_s() - last_s < _FORGOTTEN_S else 0

    def add(self, model: str) -> None:
        before = self[model]
        self._merge()
        if model not in self._counts and len(self._counts) >= _MOST_MODELS:
            return
        if len(model) <= _MOST_CHARACTERS:
            self._counts[model] = (max(before, self[model]) + 1, self._unix_s())
            self._write()

    def _merge(self) -> None:
        now_s = self._unix_s()
        for model, (count, last_s) in self._read().items():
            self._counts[model] = max(
                self._counts.get(model, (0, 0.0)), (count, min(last_s, now_s))
            )
        self._counts = {
            model: entry for model, entry in self._counts.items() if now_s - entry[1] < _FORGOTTEN_S
        }

    def _read(self) -> dict[str, tuple[int, float]]:
        if self._path is None:
            return {}
        try:
            with self._path.open("rb") as file:
                return _DECODER.decode(file.read(_MOST_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, MsgspecError) as error:
            log.warning("%s: %s: no model has broken a process, then", self._path, error)
            return {}

    def _write(self) -> None:
        if self._path is None:
            return
        aside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(self._counts))
            aside.replace(self._path)
        except OSError as error:
            log.warning("%s: %s: it is forgotten with this manager", self._path, error)
            aside.unlink(missing_ok=True)


class ChosenRuntime:
    """Hosts models alone (`process`), or a tenant's in one process on each GPU (`stream`).

    Models of two tenants never share a process.
    """

    def __init__(
        self, alone: ProcessRuntime, usual: str = PROCESS, breaks: ProcessBreaks | None = None
    ) -> None:
        """`alone` has all processes; `usual` is the runtime of models without a wish.

        `breaks` counts the processes that a model broke for others.
        """
        self._workers = alone
        self._usual = usual
        self._breaks = breaks or ProcessBreaks()
        self._hosts: dict[tuple[str, str], HostingWorker] = {}
        self._watched: set[HostingWorker] = set()  # an emptied one may come again
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}

    def prepare(self) -> None:
        self._workers.prepare()

    def hosting(self, wish: str, model: str) -> str:
        wanted = wish or self._usual
        if wanted == STREAM and self._workers.can_share and not self._hosts_alone(model):
            return STREAM
        return PROCESS

    async def load(self, order: LoadOrder) -> HostedModel:
        """Load a model alone, or in its tenant's process on the GPU, which the first one makes."""
        if order.runtime != STREAM or self._hosts_alone(order.model):
            return await self._workers.load(order)
        place = order.tenant, order.gpu
        async with self._opening.setdefault(place, asyncio.Lock()):
            host = self._process_of(place)
            if host is None:
                return await self._open(order)
        if order.emptied is not None:
            await order.emptied.end()  # the tenant has a process already
        try:
            return await self._workers.load_in(host, order)
        except WireError as error:
            log.warning("the process of %s was lost while it loaded %s: %s", *place, error)
        async with self._opening[place]:
            host = self._process_of(place)
            return await (self._open(order) if host is None else self._workers.load_in(host, order))

    async def close(self) -> None:
        await self._workers.close()

    def _hosts_alone(self, model: str) -> bool:
        return self._breaks[model] >= _MOST_BREAKS

    def _process_of(self, place: tuple[str, str]) -> HostingWorker | None:
        """The tenant's process on this GPU, if further models may come there."""
        host = self._hosts.get(place)
        return host if host is not None and host.is_open and host.shared else None

    async def _open(self, order: LoadOrder) -> HostedModel:
        model = await self._workers.load(order, shared=True)
        host = self._hosts[order.tenant, order.gpu] = model.hosting
        if host not in self._watched:
            self._watched.add(host)
            host.over.add_done_callback(lambda _: self._ended(host))
        return model

    def _ended(self, host: HostingWorker) -> None:
        self._watched.discard(host)
        place = host.tenant, host.gpu
        if self._hosts.get(place) is host:
            del self._hosts[place]
        if not host.shared:
            return  # emptied, and taken by a model that has a process for itself
        for model in host.broken_by:
            name = model.order.model
            self._breaks.add(name)
            if self._hosts_alone(name):
                log.warning("%s broke its process again: it gets one of its own", name)
