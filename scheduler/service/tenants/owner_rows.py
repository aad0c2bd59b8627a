"""Owners with their terms and what they use of them, for people and for metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from cache_manager.model.ids import ModelId
from scheduler.core.core import Core
from scheduler.core.tenants.owners import Owner
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.terms_bounds import is_function
from scheduler.service.tenants.terms_book import TermsBook


@dataclass(frozen=True, slots=True)
class TermsShown:
    """The terms of an owner; None: no limit."""

    weight: float
    priority: int
    gpu_s: float | None
    window_s: float
    resident_bytes: int | None
    leases: int | None
    waiting: int | None


@dataclass(slots=True)
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
    terms: TermsShown
    use: OwnerUse


def owner_rows(book: TermsBook, core: Core, now: float, most: int | None = None) -> list[OwnerRow]:
    """Every owner that has terms, or the first ones by name."""
    return [owner_row(book, core, now, owner) for owner in islice(book, most)]


def owner_row(book: TermsBook, core: Core, now: float, owner: str) -> OwnerRow:
    """One owner, with or without terms."""
    found = book.get(owner)
    terms = TermsShown(*(OwnerTerms() if found is None else found.terms))
    use = _use(core, owner, now)
    use.refused = dict(book.refused.get(owner, ()))
    return OwnerRow(owner, "" if found is None else found.set_by, terms, use)


def _use(core: Core, name: str, now: float) -> OwnerUse:
    """What the core has counted of it; without anybody's terms it counts nothing."""
    tenancy, index = core.placer.tenancy, core.cluster.index
    owners = tenancy.owners
    use = OwnerUse()
    owner: Owner | None
    if is_function(name):
        owner = function = owners.functions.get(name)
        models: Iterable[ModelId] = () if function is None else function.models
        functions = [] if function is None else [function]
    else:
        owner = space = owners.spaces.get(name)
        models = index.parts.models_of(name)
        functions = [] if space is None else list(space.functions.values())
    use.resident_bytes = sum(
        cache.residents[model].bytes for model in models for cache in index.holders(model).values()
    )
    if owner is not None:
        use.gpu_s = owner.seen_s(now)
        use.leases, use.waiting = owner.leases, owner.waiting
        use.held_back = sum(each.held + each.paused for each in functions)
    return use
