"""Every error of the gateway and of the scheduler has a status."""

import pytest

from gateway_ext import error_statuses, errors
from gateway_ext.model import FunctionId
from scheduler.model.errors import GivenBack, NotLeading, OverQuota, StoreUnavailable
from scheduler.model.values import RequestId

F = FunctionId("n", "f")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.BadDeployment("x"), 400),
        (errors.WrongMethod("TRACE"), 405),
        (errors.NotAllowed(), 401),
        (errors.UnknownFunction(F), 404),
        (errors.SecretExists("n", "s"), 409),
        (errors.Unsupported("x"), 501),
        (errors.TooLarge(1), 413),
        (errors.Busy(F, 2.4), 429),
        (errors.CallerGone(), 499),
        (errors.NoInstance(F, "x"), 503),
        (errors.Unreachable(F, "x", sent=True), 502),
        (errors.TimedOut(F, 1), 504),
        (errors.NoGpu(507, "x"), 507),
        (errors.ProviderFailed("x"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_has_its_status(error: errors.GatewayError, status: int) -> None:
    assert error_statuses.status_of(error) == status


def test_every_error_is_in_the_table() -> None:
    def below(kind: type[errors.GatewayError]) -> list[type[errors.GatewayError]]:
        return [kind, *(one for child in kind.__subclasses__() for one in below(child))]

    known = {kind for kind, _ in error_statuses.STATUSES} | {errors.OwnStatus}
    ours = [kind for kind in below(errors.GatewayError) if kind.__module__ == errors.__name__]
    left = [kind for kind in ours[1:] if not issubclass(kind, tuple(known))]
    assert not left


def test_headers_name_the_time_to_retry_and_the_way_to_log_in() -> None:
    assert error_statuses.headers_of(errors.Busy(F, 2.4)) == [(b"retry-after", b"3")]
    assert error_statuses.headers_of(errors.Busy(F, 1e12)) == [(b"retry-after", b"3600")]
    assert error_statuses.headers_of(errors.NoGpu(429, "x", 0.1)) == [(b"retry-after", b"1")]
    assert error_statuses.headers_of(errors.NoGpu(503, "x")) == [(b"retry-after", b"1")]
    assert error_statuses.headers_of(errors.NoInstance(F, "x")) == [(b"retry-after", b"1")]
    assert error_statuses.headers_of(errors.NoGpu(504, "x")) == []
    ((name, _),) = error_statuses.headers_of(errors.NotAllowed())
    assert name == b"www-authenticate"


def test_scheduler_errors_become_statuses() -> None:
    assert error_statuses.no_gpu(NotLeading(None)).status == 503
    refused = error_statuses.no_gpu(OverQuota(RequestId("r"), "team has 3 of 3 leases", 12.2))
    assert (refused.status, str(refused)) == (
        429, "a quota is used up: request r: team has 3 of 3 leases",
    )  # fmt: skip
    assert error_statuses.headers_of(refused) == [(b"retry-after", b"13")]
    assert error_statuses.no_gpu(GivenBack(RequestId("r"), "x")).status == 503
    assert error_statuses.no_gpu(StoreUnavailable("x")).status == 500
