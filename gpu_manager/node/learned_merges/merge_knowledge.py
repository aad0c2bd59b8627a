"""What is known of merging each model's calls, for its next workers and for later managers.

Files are read and written off the loop; what was learned is written a moment later.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from common.tasks import BackgroundTasks
from gpu_manager.node.learned_merges.knowledge_files import KnowledgeFiles
from gpu_manager.worker.merging.known_merges import KnownMerges, KnownRecord

log = logging.getLogger(__name__)

_MOST_MODELS = 4096  # in memory, each on one kind of device
_WRITE_S = 1.0  # from the first news until they are written

_Key = tuple[str, str]


class MergeKnowledge:
    """The knowledge about every model on each kind of device that workers of this node had."""

    def __init__(self, files: KnowledgeFiles | None = None) -> None:
        """Without files, all of it ends with the manager."""
        self._files = files
        self._known: OrderedDict[_Key, KnownMerges] = OrderedDict()
        self._news: dict[_Key, KnownMerges] = {}
        self._writes = BackgroundTasks(log, "writing what is known of merged calls")
        self._closing = asyncio.Event()

    async def of(self, model: str, device: str) -> KnownMerges:
        """Return what is known of a model on this kind of device, from its file if need be."""
        key = model, device
        known = self._known.get(key)
        if known is None:
            if self._files is None:
                found = KnownMerges(model, device)
            else:
                found = await asyncio.to_thread(self._files.read, model, device)
            known = self._known.setdefault(key, found)  # others may have read it meanwhile
            self._forget_oldest()
        self._known.move_to_end(key)
        return known

    def forbid(self, known: KnownMerges, never: Mapping[str, str]) -> None:
        """Never merge calls of these programs again, on this kind of device."""
        if known.forbid(never.items()):
            self._note(known)

    def learn(self, known: KnownMerges, records: Sequence[KnownRecord]) -> None:
        """Take over what a worker has measured."""
        if records:
            known.learn(records)
            self._note(known)

    async def close(self) -> None:
        """Write what has not been written."""
        self._closing.set()
        await self._writes.wait()

    def _note(self, known: KnownMerges) -> None:
        if self._files is None:
            return
        if not self._news:
            self._writes.start(self._write_later())
        self._news[known.model, known.device] = known

    async def _write_later(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), _WRITE_S)
        news, self._news = self._news, {}
        for known in news.values():
            if self._files is not None:
                await asyncio.to_thread(self._files.write, known.copy())

    def _forget_oldest(self) -> None:
        """Forget what was asked for longest ago; what workers add to it is written all the same."""
        while len(self._known) > _MOST_MODELS:
            self._known.popitem(last=False)
