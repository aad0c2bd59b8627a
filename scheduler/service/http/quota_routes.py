"""The routes of owners' terms: weights, priorities and quotas, and what is used of them."""

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from scheduler.model.errors import BadValue, MalformedRequest, UnknownName
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.terms_bounds import check_owner, check_terms
from scheduler.service.leadership.term import Office
from scheduler.service.tenants.owner_rows import OwnerRow, owner_row, owner_rows

_USUAL = OwnerTerms()


class QuotaService(Protocol):
    """The part of the service that these routes use."""

    def office(self) -> Office:
        """The leader's core, driver and history; NotLeading if this scheduler does not lead."""
        ...

    async def set_terms(self, owner: str, terms: OwnerTerms | None) -> None:
        """Put an owner's terms in force, here and after a restart; None: no longer."""
        ...


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


class OwnersShown(BaseModel):
    """Every owner that has terms, by name."""

    owners: list[OwnerRow]


def quota_router(service: QuotaService, view: Sequence[Any], change: Sequence[Any]) -> APIRouter:
    """The routes; `view` and `change` are dependencies: who may look, and who may act."""
    routes = APIRouter(tags=["quotas"])

    @routes.get("/quotas", dependencies=view, summary="Owners with terms, and what they use")
    async def every_owner() -> OwnersShown:
        office = service.office()
        return OwnersShown(owners=owner_rows(office.terms, office.core, office.clock.now_s()))

    @routes.get("/quotas/{owner:path}", dependencies=view, summary="One owner's terms and use")
    async def one_owner(owner: str) -> OwnerRow:
        return _row(service.office(), _checked(owner))

    @routes.put("/quotas/{owner:path}", dependencies=change, summary="Set an owner's terms")
    async def set_terms(owner: str, body: TermsBody) -> OwnerRow:
        service.office()
        try:
            terms = check_terms(OwnerTerms(**body.model_dump()))
        except BadValue as error:
            raise MalformedRequest(str(error)) from error
        await service.set_terms(_checked(owner), terms)
        return _row(service.office(), owner)

    @routes.delete("/quotas/{owner:path}", dependencies=change, summary="Remove an owner's terms")
    async def remove_terms(owner: str) -> OwnerRow:
        if _checked(owner) not in service.office().terms.of_operators:
            raise UnknownName("terms that an operator set of", owner)
        await service.set_terms(owner, None)
        return _row(service.office(), owner)

    return routes


def _row(office: Office, owner: str) -> OwnerRow:
    return owner_row(office.terms, office.core, office.clock.now_s(), owner)


def _checked(owner: str) -> str:
    try:
        return check_owner(owner)
    except BadValue as error:
        raise MalformedRequest(str(error)) from error
