"""What a function's process believes of its GPU manager."""

import pytest

from torch_shim.errors import BadFrame
from torch_shim.wire.manager_session import LeaseElsewhere, ManagerSession, ModelLease


class Elsewhere(ManagerSession):
    """A session whose manager always names another node."""

    def __init__(self) -> None:
        """Nobody is asked."""

    def acquire(self, *_: object, **__: object) -> ModelLease | LeaseElsewhere:
        return LeaseElsewhere(7, "other", ("tcp:other:1",), "token")


def test_lease_of_a_token_is_refused_when_the_manager_leads_elsewhere_again() -> None:
    with pytest.raises(BadFrame, match="other"):
        Elsewhere().acquire_here("d" * 64, 1, "token")
