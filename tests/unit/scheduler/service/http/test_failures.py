"""The table of errors, and access rights."""

from base64 import b64encode

import pytest

from scheduler.model import errors
from scheduler.model.errors import (
    CallerNotAllowed,
    ModelsTooLarge,
    NotLeading,
    OverQuota,
    QueueFull,
)
from scheduler.model.values import RequestId
from scheduler.service import error_table
from scheduler.service.access import ApiAccess, ApiRole, token

R0 = RequestId("r0")
SECRET = b"secret"


def test_every_row_of_the_table_can_be_reached() -> None:
    """A row below one of a base class never would be."""
    kinds = [kind for kind, _ in error_table.TABLE]
    for number, kind in enumerate(kinds):
        assert not any(issubclass(kind, above) for above in kinds[:number])


def test_every_end_of_a_request_has_a_row() -> None:
    kinds = {kind for kind, _ in error_table.TABLE}
    assert set(errors.RequestEnded.__subclasses__()) <= kinds


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (QueueFull(R0, "full", 3), 429, {"retry-after": "1"}),
        (OverQuota(R0, "team has 3 of 3 leases"), 429, {"retry-after": "1"}),
        (OverQuota(R0, "team has used 30 s of 30 s", 12.2), 429, {"retry-after": "13"}),
        (NotLeading(None), 503, {"retry-after": "1"}),
        (NotLeading("http://other"), 421, {"location": "http://other"}),
        (CallerNotAllowed("who?", known=True), 403, {}),
        (errors.SchedulerError("of no kind"), 500, {}),
    ],
)
def test_error_is_answered_with_its_status_and_headers(
    error: errors.SchedulerError, status: int, headers: dict[str, str]
) -> None:
    assert error_table.failure(error).status == status
    assert error_table.headers(error) == headers


def test_body_holds_the_facts() -> None:
    answer = error_table.body(ModelsTooLarge(R0, "too large", 9, 8))
    assert answer == {
        "error": "too-large",
        "message": "request r0: too large",
        "request": "r0",
        "needed_bytes": 9,
        "largest_bytes": 8,
    }


# -- access rights -----------------------------------------------------------------------------


@pytest.mark.parametrize("role", list(ApiRole))
def test_token_lets_in_as_bearer_and_as_password(role: ApiRole) -> None:
    access, secret_token = ApiAccess(SECRET), token(SECRET, role)
    assert access.role(f"Bearer {secret_token}".encode()) is role
    basic = b64encode(f"{role}:{secret_token}".encode())
    assert access.role(b"Basic " + basic) is role


def test_nothing_else_lets_in() -> None:
    access = ApiAccess(SECRET)
    caller = token(SECRET, ApiRole.CALLER)
    as_admin = b64encode(f"admin:{caller}".encode())
    of_another_cluster = f"Bearer {token(b'other', ApiRole.ADMIN)}".encode()
    for header in (b"", b"Bearer ", caller.encode(), b"Basic " + as_admin, of_another_cluster):
        assert access.role(header) is None
