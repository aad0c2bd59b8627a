"""What is answered and logged when a handler raises."""

import pytest

from gateway_ext.runtime.handler.handler_failure import failure_of
from torch_shim.errors import (
    DataUnreachable,
    GpuQueueFull,
    GpuUnavailable,
    ManagerUnreachable,
    QuotaUsedUp,
    RemoteFailure,
    ShimError,
)


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as found:
        raise error
    return found.value


def test_call_is_put_off_when_a_quota_is_used_up() -> None:
    found = failure_of(raised(QuotaUsedUp("request r: team has 3 of 3 leases")))
    assert (found.status, found.logged) == (429, f"was put off: {found.why}")
    assert "team has 3 of 3 leases" in found.why


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (GpuUnavailable("CUDA error: worker lost: the GPU manager was lost"), 503),
        (ManagerUnreachable("unix:/node.sock", "connection refused"), 503),
        (DataUnreachable("this node's GPU manager cannot be reached"), 503),
        (GpuQueueFull("CUDA error: queue full: 4096 requests wait"), 429),
    ],
)
def test_call_may_come_again_when_it_is_not_to_blame(error: Exception, status: int) -> None:
    found = failure_of(raised(error))
    assert found == (status, str(error), f"was put off: {error}")


@pytest.mark.parametrize("error", [RemoteFailure("worker lost", "it ended"), ValueError("x")])
def test_any_other_error_is_answered_500_and_logged_with_its_place(error: Exception) -> None:
    found = failure_of(raised(error))
    assert (found.status, found.why) == (500, f"the function raised {type(error).__name__}")
    assert found.logged.startswith("raised\nTraceback")


def test_status_of_an_error_is_not_any_number() -> None:
    class Odd(Exception):
        answer_status = 200

    assert failure_of(Odd()).status == 500


def test_error_is_one_of_the_shims_and_of_torch() -> None:
    assert issubclass(QuotaUsedUp, ShimError)
    assert issubclass(QuotaUsedUp, RuntimeError)
