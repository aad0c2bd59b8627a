"""Operators' terms in the datastore: written before they are in force, and under the fence."""

import asyncio
from collections.abc import Callable
from logging import Logger
from types import TracebackType
from typing import Self

from common.tasks import BackgroundTasks
from scheduler.model.errors import DatastoreError, Fenced, MalformedRequest, NotLeading
from scheduler.model.owner_terms import OwnerTerms
from scheduler.service.tenants.terms_book import TermsBook
from scheduler.store.datastore import MAX_CHANGES, Fence, Store
from scheduler.store.stored_records import encoded
from scheduler.store.terms_records import TERMS, terms_key, terms_record

MOST_OWNERS = 4_096
_TRY_AGAIN_S = 1.0


class KeptTerms:
    """Sets terms for one leader, and keeps them stored; use it as a context.

    Terms are written while this scheduler leads, so a new leader that has read them misses none.
    After an outage the datastore is made to hold what is in force: it may have lost its data, and
    a write whose answer was lost may have been done. `fence` is None without a leadership.
    """

    def __init__(
        self, store: Store, book: TermsBook, fence: Callable[[], Fence | None], log: Logger
    ) -> None:
        self._store = store
        self._book = book
        self._fence = fence
        self._log = log
        self._writing = asyncio.Lock()
        self._mending = False
        self._tasks = BackgroundTasks(log, "keeping the terms of owners")
        self._forget_health: Callable[[], None] = lambda: None

    async def __aenter__(self) -> Self:
        self._forget_health = self._store.on_health_change(self._health_changed)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._forget_health()
        await self._tasks.close()

    async def set(self, owner: str, terms: OwnerTerms | None) -> None:
        """Put an owner's terms in force, here and for every later leader; None: no more terms.

        MalformedRequest if too many owners have terms, NotLeading if another scheduler leads,
        StoreUnavailable if the datastore does not answer: then nothing has changed.
        """
        async with self._writing:
            of_operators = self._book.of_operators
            if terms is not None and owner not in of_operators and len(of_operators) >= MOST_OWNERS:
                raise MalformedRequest(f"at most {MOST_OWNERS} owners have terms")
            key = terms_key(owner)
            puts = {} if terms is None else {key: encoded(terms_record(terms))}
            try:
                await self._store.write(puts, (key,) if terms is None else (), self._fence())
            except Fenced as error:
                raise NotLeading(None) from error
            except (DatastoreError, asyncio.CancelledError):
                self._mend_later()  # the write may have been done
                raise
            self._book.set(owner, terms)

    # -- after an outage --------------------------------------------------------------------------

    def _health_changed(self, healthy: bool) -> None:  # noqa: FBT001  # the port's callback
        if healthy:
            self._mend_later()

    def _mend_later(self) -> None:
        if not self._mending:
            self._mending = True
            self._tasks.start(self._mend())

    async def _mend(self) -> None:
        """Have the datastore hold what is in force, once it answers."""
        while True:
            await asyncio.sleep(_TRY_AGAIN_S)
            try:
                async with self._writing:
                    await self._write_differences()
                    self._mending = False
                    return
            except DatastoreError as error:
                self._log.debug("the terms of owners are not stored: %s", error)

    async def _write_differences(self) -> None:
        stored = (await self._store.list(TERMS)).values
        in_force = {
            terms_key(owner): encoded(terms_record(terms))
            for owner, terms in self._book.of_operators.items()
        }
        changed = [key for key, value in in_force.items() if stored.get(key) != value]
        changed += [key for key in stored if key not in in_force]
        for begin in range(0, len(changed), MAX_CHANGES):
            part = changed[begin : begin + MAX_CHANGES]
            puts = {key: in_force[key] for key in part if key in in_force}
            await self._store.write(puts, [key for key in part if key not in puts], self._fence())
