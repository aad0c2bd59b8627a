"""Quotas in a leader's service: their routes and metrics, and what is shown of owners."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Annotated, Any, Self, TypeVar

from fastapi import APIRouter
from msgspec import structs
from pydantic import BaseModel, ConfigDict, Field

from cache_manager.model.ids import ModelId
from common.telemetry.metrics import Metric, MetricKind, Values, gauge
from scheduler.features.hooks import TermFeature, TermParts
from scheduler.features.tenants.owners import Owner
from scheduler.features.tenants.tenancy import Tenancy
from scheduler.features.tenants.terms import KeptTerms, TermsBook
from scheduler.model.errors import BadValue, MalformedRequest, UnknownName
from scheduler.model.events import TermsSet
from scheduler.model.owner_terms import OwnerTerms, check_owner, check_terms, is_function
from scheduler.wire.caller_stream import ToldTerms

_Value = TypeVar("_Value")
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


class Quotas(TermFeature):
    """The terms of owners in one term."""

    gauges = (_USED, _LIMIT, _REFUSED, _WEIGHT, _HELD_BACK)

    def __init__(self, term: TermParts) -> None:
        self._term = term
        self.book = TermsBook(lambda owner, terms: term.report(TermsSet(owner, terms)))
        self._kept = KeptTerms(term.store, self.book, term.fence, term.log)

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

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._kept.running()

    def caller_present(self, caller: str) -> AbstractContextManager[None]:
        return self.book.present(caller)

    def told(self, caller: str, message: ToldTerms) -> None:
        self.book.take(caller, message)

    async def set(self, owner: str, terms: OwnerTerms | None) -> None:
        """Put an owner's terms in force, here and after a restart; None: no longer."""
        await self._kept.set(owner, terms)

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
        rows = [asdict(row) for row in self.rows(_MOST_IN_FEED)]
        return {"owners": {"count": len(self.book), "rows": rows}}

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
            functions = [] if function is None else [function]
        else:
            owner = space = owners.spaces.get(name)
            models = index.parts.models_of(name)
            functions = [] if space is None else list(space.functions.values())
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
            sum(entry.held + entry.paused for entry in functions),
            refused,
        )


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
