"""Quotas in a leader's service: their routes and metrics, and what is shown of owners."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, NamedTuple, Self, TypeVar

from fastapi import APIRouter
from msgspec import json, structs
from pydantic import BaseModel, ConfigDict, Field

from cache_manager.model.ids import ModelId
from common.tasks import BackgroundTasks
from common.telemetry.metrics import Metric, MetricKind, Values, gauge
from scheduler.features.hooks import TermFeature, TermParts
from scheduler.features.tenants.owners import Owner
from scheduler.features.tenants.tenancy import Tenancy
from scheduler.model.errors import (
    BadValue,
    DatastoreError,
    Fenced,
    MalformedRequest,
    NotLeading,
    UnknownName,
)
from scheduler.model.events import TermsSet
from scheduler.model.owner_terms import OwnerTerms, check_owner, check_terms, is_function
from scheduler.store.datastore import MAX_CHANGES
from scheduler.store.recovery import sound_records
from scheduler.store.stored_records import key
from scheduler.wire.caller_stream import ToldTerms
from scheduler.wire.codec import encoded, read

_Value = TypeVar("_Value")
TERMS = "terms/"
_TERMS = json.Decoder(OwnerTerms)
_USUAL = OwnerTerms()


class TermsBody(BaseModel):
    """The terms of one owner; what is left out has no limit, or is as usual."""

    model_config = ConfigDict(extra="forbid", strict=True)

    weight: Annotated[float, Field(allow_inf_nan=False, examples=[2.0])] = _USUAL.weight
    priority: int = _USUAL.priority
    gpu_s: Annotated[float | None, Field(allow_inf_nan=False, examples=[30.0])] = None
    window_s: Annotated[float, Field(allow_inf_nan=False)] = _USUAL.window_s
    resident_bytes: int | None = None
    leases: int | None = None
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class OwnerUse:
    """What an owner uses at this moment; `gpu_s` is the GPU time in the window of its quota.

    `held_back` requests wait until another one of the owner has ended, until a quota has room, or
    until others had their turn; `refused` ones were refused in this term, by quota.
    """

    gpu_s: float = 0.0
    resident_bytes: int = 0
    leases: int = 0
    waiting: int = 0
    held_back: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """One owner; `set_by` is `operator`, `function` (its annotations), or empty: nobody."""

    owner: str
    set_by: str
    terms: TermsBody
    use: OwnerUse


class OwnersShown(BaseModel):
    """Every owner that has terms, by name."""

    owners: list[OwnerRow]


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"gpufaas_scheduler_{name}", MetricKind.GAUGE, help_text, labels)


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


_USED = _gauge(
    "owner_used",
    "What an owner uses of a quota: gpu_seconds, resident_bytes, leases, waiting",
    "owner",
    "quota",
)
_LIMIT = _gauge(
    "owner_limit", "An owner's quotas; those without a limit are not here", "owner", "quota"
)
_WEIGHT = _gauge("owner_weight", "An owner's weight", "owner")
_HELD_BACK = _gauge(
    "owner_held_back_requests", "An owner's waiting requests that may not be placed yet", "owner"
)
_REFUSED = Metric(
    "gpufaas_scheduler_owner_refused_requests_total",
    MetricKind.COUNTER,
    "Requests of this term that were over quota",
    ("owner", "quota"),
)
_MOST_IN_FEED = 200
MOST_OWNERS = 4_096
_TRY_AGAIN_S = 1.0


class Quotas(TermFeature):
    """The terms of owners in one term.

    They are written while this scheduler leads, so a new leader that has read them misses none.
    After an outage the datastore is made to hold what is in force: it may have lost its data, and
    a write whose answer was lost may have been done.
    """

    gauges = (_USED, _LIMIT, _REFUSED, _WEIGHT, _HELD_BACK)

    def __init__(self, term: TermParts) -> None:
        self._term = term
        self.book = TermsBook(lambda owner, terms: term.report(TermsSet(owner, terms)))
        self._writing = asyncio.Lock()
        self._doubted = asyncio.Event()

    @classmethod
    def add_routes(cls, reads: APIRouter, orders: APIRouter, serving: Callable[[], Self]) -> None:
        @reads.get("/quotas", tags=["quotas"], summary="Owners with terms, and what they use")
        async def every_owner() -> OwnersShown:
            return OwnersShown(owners=serving().rows())

        @reads.get("/quotas/{owner:path}", tags=["quotas"], summary="One owner's terms and use")
        async def one_owner(owner: str) -> OwnerRow:
            own = serving()
            return own.row(_checked(check_owner, owner))

        @orders.put("/quotas/{owner:path}", tags=["quotas"], summary="Set an owner's terms")
        async def set_terms(owner: str, body: TermsBody) -> OwnerRow:
            own = serving()
            terms = _checked(check_terms, OwnerTerms(**body.model_dump()))
            await own.set(_checked(check_owner, owner), terms)
            return serving().row(owner)

        @orders.delete("/quotas/{owner:path}", tags=["quotas"], summary="Remove an owner's terms")
        async def remove_terms(owner: str) -> OwnerRow:
            _checked(check_owner, owner)
            own = serving()
            if owner not in own.book.of_operators:
                raise UnknownName("terms that an operator set of", owner)
            await own.set(owner, None)
            return serving().row(owner)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the terms; keep them stored, after outages of the datastore too."""
        store, log = self._term.store, self._term.log
        for owner, terms in (await sound_records(store, TERMS, owner_terms, log)).items():
            self.book.set(owner, terms)
        forget_health = store.on_health_change(self._health_changed)
        tasks = BackgroundTasks(log, "keeping the terms of owners")
        tasks.start(self._mend())
        try:
            yield
        finally:
            forget_health()
            await tasks.close()

    def caller_present(self, caller: str) -> AbstractContextManager[None]:
        return self.book.present(caller)

    def told(self, caller: str, message: ToldTerms) -> None:
        self.book.take(caller, message)

    async def set(self, owner: str, terms: OwnerTerms | None) -> None:
        """Put an owner's terms in force, here and for every later leader; None: no more terms.

        MalformedRequest if too many owners have terms, NotLeading if another scheduler leads,
        StoreUnavailable if the datastore does not answer: then nothing has changed.
        """
        async with self._writing:
            of_operators = self.book.of_operators
            if terms is not None and owner not in of_operators and len(of_operators) >= MOST_OWNERS:
                raise MalformedRequest(f"at most {MOST_OWNERS} owners have terms")
            stored_key = key(TERMS, owner)
            puts = {} if terms is None else {stored_key: encoded(terms)}
            deletes = (stored_key,) if terms is None else ()
            try:
                await self._term.store.write(puts, deletes, self._term.fence())
            except Fenced as error:
                raise NotLeading(None) from error
            except (DatastoreError, asyncio.CancelledError):
                self._doubted.set()  # the write may have been done
                raise
            self.book.set(owner, terms)

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
                self._term.log.debug("the terms of owners are not stored: %s", error)

    async def _write_differences(self) -> None:
        stored = (await self._term.store.list(TERMS)).values
        in_force = {
            key(TERMS, owner): encoded(terms) for owner, terms in self.book.of_operators.items()
        }
        changed = [name for name, value in in_force.items() if stored.get(name) != value]
        changed += [name for name in stored if name not in in_force]
        for begin in range(0, len(changed), MAX_CHANGES):
            part = changed[begin : begin + MAX_CHANGES]
            puts = {name: in_force[name] for name in part if name in in_force}
            deletes = [name for name in part if name not in puts]
            await self._term.store.write(puts, deletes, self._term.fence())

    # -- what is shown ----------------------------------------------------------------------------

    def rows(self, most: int | None = None) -> list[OwnerRow]:
        """Every owner that has terms, or the first ones by name."""
        return [self.row(owner) for owner in islice(self.book, most)]

    def row(self, owner: str) -> OwnerRow:
        """One owner, with or without terms."""
        in_force = self.book.get(owner)
        terms = _USUAL if in_force is None else in_force.terms
        set_by = "" if in_force is None else in_force.set_by
        return OwnerRow(owner, set_by, TermsBody(**structs.asdict(terms)), self._use(owner))

    def shown(self) -> Mapping[str, Any]:
        return {"owners": {"count": len(self.book), "rows": self.rows(_MOST_IN_FEED)}}

    def families(self) -> Iterator[Values]:
        rows = self.rows(self._term.settings.scheduler.metric_names)
        used, limits, refused = [], [], []
        for row in rows:
            for quota, (limit, amount) in _quotas(row).items():
                used.append(((row.owner, quota), amount))
                if limit is not None:
                    limits.append(((row.owner, quota), float(limit)))
            refused += [((row.owner, quota), float(n)) for quota, n in row.use.refused.items()]
        yield gauge(_USED, used)
        yield gauge(_LIMIT, limits)
        yield gauge(_REFUSED, refused)
        yield gauge(_WEIGHT, [((row.owner,), row.terms.weight) for row in rows])
        yield gauge(_HELD_BACK, [((row.owner,), row.use.held_back) for row in rows])

    def _use(self, name: str) -> OwnerUse:
        """What the core has counted of it; without anybody's terms it counts nothing."""
        core = self._term.core
        owners, index = core.layer(Tenancy).owners, core.cluster.index
        owner: Owner | None
        if is_function(name):
            owner = function = owners.functions.get(name)
            models: Iterable[ModelId] = () if function is None else function.models
        else:
            owner, models = owners.spaces.get(name), index.parts.models_of(name)
        resident_bytes = sum(
            cache.residents[model].bytes
            for model in models
            for cache in index.holders(model).values()
        )
        refused = dict(owners.refused.get(name, ()))
        if owner is None:
            return OwnerUse(resident_bytes=resident_bytes, refused=refused)
        return OwnerUse(
            owner.seen_s(self._term.now_s()),
            resident_bytes,
            owner.leases,
            owner.waiting,
            owner.waiting - owner.exposed,
            refused,
        )


def owner_terms(value: bytes) -> OwnerTerms:
    return check_terms(read(_TERMS, value))


def _checked(check: Callable[[_Value], _Value], value: _Value) -> _Value:
    try:
        return check(value)
    except BadValue as error:
        raise MalformedRequest(str(error)) from error


def _quotas(row: OwnerRow) -> Mapping[str, tuple[float | None, float]]:
    """The limit and the use of each quota."""
    terms, use = row.terms, row.use
    return {
        "gpu_seconds": (terms.gpu_s, use.gpu_s),
        "resident_bytes": (terms.resident_bytes, use.resident_bytes),
        "leases": (terms.leases, use.leases),
        "waiting": (terms.waiting, use.waiting),
    }
