"""Writes the core's state to the datastore: coalesced, fenced and off the request path."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from logging import Logger
from typing import Self

from cache_manager.model.ids import ModelId
from common.clock import Clock
from scheduler.core.core import Core
from scheduler.model.errors import BadValue, DatastoreError, Fenced, StoreUnavailable
from scheduler.model.profiles import Profile
from scheduler.store.datastore import MAX_CHANGES, Fence, Store
from scheduler.store.stored_records import (
    HOUR_S,
    MODELS,
    OF_GPUS,
    gpu_records,
    is_unused,
    key,
    name,
    stored_model,
)
from scheduler.wire.codec import encoded
from scheduler.wire.model_records import model_record

# Changes are collected for this long, so that what is written is at most 50 ms behind.
COLLECT_S = 0.04
# GPUs of an earlier leader that have not returned within this time are forgotten.
RETURN_S = 60.0
# All records are tried again this long after some were refused: an operator may have mended it.
REFUSED_AGAIN_S = 60.0
_TRY_AGAIN_S = 0.25
_WRITE_BYTES = 512 * 1024  # etcd takes 1.5 MiB in one request
_RECORD_BYTES = 1024 * 1024


class Keeper:
    """Keeps GPU status, LRU lists, finish times and profiles in the datastore, fenced.

    `async with` keeps the records up to date, and writes once more at its end. After an election or
    an outage of the datastore it reads the stored records, and writes those that differ. The
    profile of a model that was neither resident nor reported for `models_keep_s`, or that the core
    has forgotten, is deleted. A record that cannot be written is logged and left out, until it
    changes or for a minute: the others are written.
    """

    def __init__(
        self,
        core: Core,
        clock: Clock,
        store: Store,
        fence: Callable[[], Fence | None],
        fenced_off: Callable[[], None],
        log: Logger,
        models_keep_s: float = math.inf,
    ) -> None:
        self._core = core
        self._clock = clock
        self._store = store
        self._fence = fence
        self._fenced_off = fenced_off
        self._log = log
        self._models_keep_s = models_keep_s
        self._used_unix_s: dict[ModelId, int] = {}
        self._hour = 0
        self._unix_offset_s = time.time() - clock.now_s()
        self._began_s = clock.now_s()
        self._touched = asyncio.Event()
        self._touched_s: float | None = None
        self._surveyed: Fence | None = None
        self._stored: dict[str, bytes] = {}
        self._records: dict[str, object] = {}
        self._unwritten: set[str] = set()
        self._next_try_s = 0.0
        self._looked_through: tuple[int, int] | None = None
        self._running: asyncio.Task[None] | None = None
        self._forget_health: Callable[[], None] = lambda: None

    async def __aenter__(self) -> Self:
        self.touched()
        self._running = asyncio.create_task(self._run())
        self._forget_health = self._store.on_health_change(self._health_changed)
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._forget_health()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        with suppress(DatastoreError):
            await self.flush()

    def touched(self) -> None:
        if self._touched_s is None:
            self._touched_s = self._clock.now_s()
        self._touched.set()

    @property
    def behind_s(self) -> float:
        """How long the oldest unwritten change has been waiting."""
        return 0.0 if self._touched_s is None else self._clock.now_s() - self._touched_s

    @property
    def unwritten(self) -> int:
        return len(self._unwritten)

    async def flush(self) -> None:
        fence = self._fence()
        if fence is None:
            return
        if fence != self._surveyed:
            await self._survey()
        self._surveyed = None  # until everything is written
        since_s, self._touched_s = self._touched_s, None
        self._touched.clear()
        puts, deletes = self._differences()
        try:
            await self._write(puts, deletes, fence)
        except DatastoreError:
            self._touched_s = since_s
            self._touched.set()
            raise
        if self._unwritten and self._clock.now_s() >= self._next_try_s:
            self._next_try_s = self._clock.now_s() + REFUSED_AGAIN_S
        else:
            self._surveyed = fence

    async def _run(self) -> None:
        while True:
            await self._touched.wait()
            await asyncio.sleep(COLLECT_S)
            try:
                await self.flush()
            except Fenced as error:
                self._log.warning("not written: %s", error)
                self._fenced_off()
                await asyncio.sleep(_TRY_AGAIN_S)
            except StoreUnavailable as error:
                self._log.debug("not written: %s", error)
                await asyncio.sleep(_TRY_AGAIN_S)
                while not self._store.healthy:
                    await asyncio.sleep(_TRY_AGAIN_S)
            except DatastoreError as error:
                self._log.error("not written: %s", error)
                await asyncio.sleep(_TRY_AGAIN_S)

    def _health_changed(self, healthy: bool) -> None:  # noqa: FBT001  # the port's callback
        """Read the stored records again: the datastore may have lost its data."""
        if healthy:
            self._surveyed = None
            self.touched()

    # -- what differs ---------------------------------------------------------------------------

    async def _survey(self) -> None:
        """Read the stored records; earlier writes may be lost."""
        stored: dict[str, bytes] = {}
        for kind in (*OF_GPUS, MODELS):
            stored.update((await self._store.list(kind)).values)
        self._stored = stored
        self._records.clear()
        self._hour = 0
        self._looked_through = None
        for stored_key, value in stored.items():
            if not stored_key.startswith(MODELS):
                continue
            with suppress(BadValue):  # recovery logged the record; the model's next use replaces it
                used_unix_s = stored_model(value).used_unix_s
                model = ModelId(name(MODELS, stored_key))
                self._used_unix_s[model] = max(used_unix_s, self._used_unix_s.get(model, 0))

    def _differences(self) -> tuple[dict[str, bytes], list[str]]:
        puts: dict[str, bytes] = {}
        current: set[str] = set()
        for gpu in self._core.cluster.gpus.values():
            for stored_key, record in gpu_records(gpu, self._unix_offset_s):
                current.add(stored_key)
                self._differs(stored_key, record, puts)
        for stored_key, record in self._of_models():
            self._differs(stored_key, record, puts)
        return puts, [*self._left(current), *self._unused(puts)]

    def _of_models(self) -> Iterator[tuple[str, object]]:
        """Records of changed and used models; after a survey, of all models that are kept."""
        profiles = self._core.cluster.profiles
        known, used = profiles.known, profiles.take_changed()
        hour = self._now_unix_s() // HOUR_S
        if hour != self._hour:
            self._hour = hour
            used |= _informative(known).intersection(self._core.cluster.index.held_models())
        self._used_unix_s.update(dict.fromkeys(used, hour * HOUR_S))
        first = not any(record_key.startswith(MODELS) for record_key in self._records)
        for model in _informative(known) | used if first else used:
            used_unix_s = self._used_unix_s.setdefault(model, hour * HOUR_S)
            if not self._is_unused(used_unix_s):
                yield key(MODELS, model), model_record(known[model], used_unix_s)

    def _unused(self, puts: Mapping[str, bytes]) -> list[str]:
        """The stored keys of models that were not used for too long, or are forgotten."""
        profiles = self._core.cluster.profiles
        state = self._hour, profiles.forgotten
        if state == self._looked_through:
            return []
        self._looked_through = state
        known, keys = profiles.known, []
        for model, used_unix_s in list(self._used_unix_s.items()):
            if model in known and not self._is_unused(used_unix_s):
                continue
            model_key = key(MODELS, model)
            if model_key in self._stored and model_key not in puts:
                keys.append(model_key)
            if model not in known:
                del self._used_unix_s[model]
                self._records.pop(model_key, None)
                self._unwritten.discard(model_key)
        return keys

    def _is_unused(self, used_unix_s: int) -> bool:
        return is_unused(used_unix_s, self._now_unix_s() - self._models_keep_s)

    def _now_unix_s(self) -> int:
        return int(self._clock.now_s() + self._unix_offset_s)

    def _differs(self, stored_key: str, record: object, puts: dict[str, bytes]) -> None:
        if self._records.get(stored_key) == record:
            return
        self._records[stored_key] = record
        try:
            value = encoded(record)
        except ValueError as error:
            self._leave_out(stored_key, error)
            return
        if len(value) > _RECORD_BYTES:
            self._leave_out(stored_key, f"{len(value)} bytes, more than {_RECORD_BYTES}")
        elif self._stored.get(stored_key) != value:
            puts[stored_key] = value
        else:
            self._unwritten.discard(stored_key)

    def _leave_out(self, stored_key: str, why: object) -> None:
        if not self._unwritten:
            self._next_try_s = self._clock.now_s() + REFUSED_AGAIN_S
        if stored_key not in self._unwritten:  # it may change, and be refused, all the time
            self._log.error("%s is not written to the datastore: %s", stored_key, why)
        self._unwritten.add(stored_key)

    def _left(self, current: set[str]) -> list[str]:
        """Stored keys of GPUs that are gone; those of an earlier leader have time to return."""
        returning = self._clock.now_s() < self._began_s + RETURN_S
        return [
            stored_key
            for stored_key in self._stored
            if stored_key.startswith(OF_GPUS)
            and stored_key not in current
            and not (returning and stored_key not in self._records)
        ]

    # -- writing --------------------------------------------------------------------------------

    async def _write(self, puts: dict[str, bytes], deletes: list[str], fence: Fence) -> None:
        apart = self._unwritten & puts.keys()  # they would be refused with all the others again
        for batch in _batches({k: value for k, value in puts.items() if k not in apart}):
            await self._write_batch(batch, fence)
        for stored_key in sorted(apart):
            await self._write_batch({stored_key: puts[stored_key]}, fence)
        left = iter(deletes)
        while chosen := list(islice(left, MAX_CHANGES)):
            await self._store.write({}, chosen, fence)
            for stored_key in chosen:
                del self._stored[stored_key]
                self._records.pop(stored_key, None)
                self._unwritten.discard(stored_key)

    async def _write_batch(self, batch: dict[str, bytes], fence: Fence) -> None:
        """Write these records; where the datastore refuses them, all but the one that it refuses.

        What stands for a datastore that is away, or for another leader, is raised.
        """
        try:
            await self._store.write(batch, (), fence)
        except (Fenced, StoreUnavailable):
            raise
        except DatastoreError as error:
            if len(batch) == 1:
                self._leave_out(next(iter(batch)), error)
                return
            for stored_key, value in batch.items():
                await self._write_batch({stored_key: value}, fence)
        else:
            self._stored.update(batch)
            self._unwritten.difference_update(batch)


def _informative(profiles: Mapping[ModelId, Profile]) -> set[ModelId]:
    """The models with a measured or declared size, time or feature."""
    return {
        model
        for model, profile in profiles.items()
        if profile.measured_bytes
        or profile.load_s
        or profile.run_s
        or profile.configured_s
        or profile.features
    }


def _batches(puts: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
    """The records in batches as large as the datastore takes."""
    batch: dict[str, bytes] = {}
    size_bytes = 0
    for stored_key, value in puts.items():
        if len(batch) == MAX_CHANGES or (batch and size_bytes + len(value) > _WRITE_BYTES):
            yield batch
            batch, size_bytes = {}, 0
        batch[stored_key] = value
        size_bytes += len(value)
    if batch:
        yield batch
