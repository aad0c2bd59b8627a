"""The terms of owners: set by operators, told by callers, in force, and kept in the datastore."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from logging import Logger
from typing import NamedTuple

from msgspec import json

from common.tasks import BackgroundTasks
from scheduler.model.errors import BadValue, DatastoreError, Fenced, MalformedRequest, NotLeading
from scheduler.model.owner_terms import OwnerTerms, check_owner, check_terms, is_function
from scheduler.store.datastore import MAX_CHANGES, Fence, Store
from scheduler.store.recovery import sound_records
from scheduler.store.stored_records import key
from scheduler.wire.caller_stream import ToldTerms
from scheduler.wire.codec import encoded, read

TERMS = "terms/"
_TERMS = json.Decoder(OwnerTerms)
OPERATOR, FUNCTION = "operator", "function"
# Functions whose own terms are kept; those of further ones are left out.
MOST_FUNCTIONS = 20_000

# What a caller told is kept for this long after its stream: a gateway may start again meanwhile.
KEPT_S = 60.0

log = logging.getLogger(__name__)

Apply = Callable[[str, OwnerTerms | None], object]


class TermsInForce(NamedTuple):
    """The terms of one owner, and who set them: an operator, or the function by annotations."""

    terms: OwnerTerms
    set_by: str


class TermsBook:
    """Has the core know the terms of every owner.

    What an operator set of an owner replaces what the function says of itself. A function's own
    terms come from callers (gateways); of several callers the one that told last decides.
    """

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._streams: Counter[str] = Counter()
        self._is_full = False
        self.of_operators: dict[str, OwnerTerms] = {}
        self._own: dict[str, dict[str, OwnerTerms]] = {}
        self._in_force: dict[str, OwnerTerms] = {}

    def set(self, owner: str, terms: OwnerTerms | None) -> None:
        """An operator sets the terms of an owner; None: no longer."""
        if terms is None:
            self.of_operators.pop(owner, None)
        else:
            self.of_operators[owner] = terms
        self._update(owner)

    @contextmanager
    def present(self, caller: str) -> Iterator[None]:
        """What a caller tells is forgotten some time after the last of its streams has ended."""
        self._streams[caller] += 1
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(KEPT_S, self._left, caller)

    def take(self, caller: str, message: ToldTerms) -> None:
        """Take one message in; BadValue if it is out of bounds, and then nothing of it is taken."""
        for own in message.functions:
            if not is_function(check_owner(own.function)):
                raise BadValue("a caller tells the terms of functions, not of namespaces")
            if own.terms is not None:
                check_terms(own.terms)
        if message.begins:
            named = {own.function for own in message.functions}
            for function in self._told_by(caller):
                if function not in named:
                    self._forget(caller, function)
        for own in message.functions:
            self.tell(caller, own.function, own.terms)

    def tell(self, caller: str, function: str, terms: OwnerTerms | None) -> None:
        """A caller tells a function's own terms, unless too many functions have some."""
        if terms is None:
            self._forget(caller, function)
            return
        if function not in self._own and len(self._own) >= MOST_FUNCTIONS:
            if not self._is_full:
                self._is_full = True
                log.warning("%s: too many functions have terms of their own", function)
            return
        told = self._own.setdefault(function, {})
        told.pop(caller, None)
        told[caller] = terms
        self._update(function)

    def get(self, owner: str) -> TermsInForce | None:
        """The terms in force of an owner; None if it has none."""
        terms = self._in_force.get(owner)
        if terms is None:
            return None
        return TermsInForce(terms, OPERATOR if owner in self.of_operators else FUNCTION)

    def __iter__(self) -> Iterator[str]:
        """Every owner that has terms, in the order of their names."""
        return iter(sorted(self._in_force))

    def __len__(self) -> int:
        return len(self._in_force)

    def _left(self, caller: str) -> None:
        self._streams[caller] -= 1
        if not self._streams[caller]:
            del self._streams[caller]
            for function in self._told_by(caller):
                self._forget(caller, function)

    def _told_by(self, caller: str) -> list[str]:
        return [function for function, told in self._own.items() if caller in told]

    def _forget(self, caller: str, function: str) -> None:
        told = self._own.get(function)
        if told is None:
            return
        told.pop(caller, None)
        if not told:
            del self._own[function]
        self._update(function)

    def _update(self, owner: str) -> None:
        """Tell the core if other terms are in force now."""
        terms = self.of_operators.get(owner)
        if terms is None and owner in self._own:
            terms = next(reversed(self._own[owner].values()))
        if terms == self._in_force.get(owner):
            return
        if terms is None:
            del self._in_force[owner]
        else:
            self._in_force[owner] = terms
        self._apply(owner, terms)


MOST_OWNERS = 4_096
_TRY_AGAIN_S = 1.0


class KeptTerms:
    """Sets terms for one leader, and keeps them stored.

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
        self._doubted = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the terms; keep them stored, after outages of the datastore too."""
        kept = await sound_records(self._store, TERMS, owner_terms, self._log)
        for owner, terms in kept.items():
            self._book.set(owner, terms)
        forget_health = self._store.on_health_change(self._health_changed)
        tasks = BackgroundTasks(self._log, "keeping the terms of owners")
        tasks.start(self._mend())
        try:
            yield
        finally:
            forget_health()
            await tasks.close()

    async def set(self, owner: str, terms: OwnerTerms | None) -> None:
        """Put an owner's terms in force, here and for every later leader; None: no more terms.

        MalformedRequest if too many owners have terms, NotLeading if another scheduler leads,
        StoreUnavailable if the datastore does not answer: then nothing has changed.
        """
        async with self._writing:
            of_operators = self._book.of_operators
            if terms is not None and owner not in of_operators and len(of_operators) >= MOST_OWNERS:
                raise MalformedRequest(f"at most {MOST_OWNERS} owners have terms")
            stored_key = key(TERMS, owner)
            puts = {} if terms is None else {stored_key: encoded(terms)}
            deletes = (stored_key,) if terms is None else ()
            try:
                await self._store.write(puts, deletes, self._fence())
            except Fenced as error:
                raise NotLeading(None) from error
            except (DatastoreError, asyncio.CancelledError):
                self._doubted.set()  # the write may have been done
                raise
            self._book.set(owner, terms)

    # -- after an outage --------------------------------------------------------------------------

    def _health_changed(self, healthy: bool) -> None:  # noqa: FBT001  # the port's callback
        if healthy:
            self._doubted.set()

    async def _mend(self) -> None:
        """Have the datastore hold what is in force, once it answers."""
        while True:
            await self._doubted.wait()
            await asyncio.sleep(_TRY_AGAIN_S)
            self._doubted.clear()
            try:
                async with self._writing:
                    await self._write_differences()
            except DatastoreError as error:
                self._doubted.set()
                self._log.debug("the terms of owners are not stored: %s", error)

    async def _write_differences(self) -> None:
        stored = (await self._store.list(TERMS)).values
        in_force = {
            key(TERMS, owner): encoded(terms) for owner, terms in self._book.of_operators.items()
        }
        changed = [name for name, value in in_force.items() if stored.get(name) != value]
        changed += [name for name in stored if name not in in_force]
        for begin in range(0, len(changed), MAX_CHANGES):
            part = changed[begin : begin + MAX_CHANGES]
            puts = {name: in_force[name] for name in part if name in in_force}
            deletes = [name for name in part if name not in puts]
            await self._store.write(puts, deletes, self._fence())


def owner_terms(value: bytes) -> OwnerTerms:
    return check_terms(read(_TERMS, value))
