"""A call whose GPU manager is lost before a worker has it."""

import pytest

from torch_shim.errors import ConnectionLost, GpuUnavailable, ManagerUnreachable, RemoteFailure
from torch_shim.leases.leasing import ModelLeases, SessionLease
from torch_shim.raised_failures import error_of
from torch_shim.remote.program import RemoteProgram
from torch_shim.wire.programs import Program, ProgramStep, Ref, Tuple
from torch_shim.wire.protocol import FailureKind


class Leases(ModelLeases):
    """Fails as often as there are errors, the next one each time."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = [*errors]
        self.asked = self.forgotten = 0

    def lease_for(self, batch: int) -> SessionLease:
        assert batch == 1
        self.asked += 1
        raise self._errors.pop(0)

    def forget_image(self) -> None:
        self.forgotten += 1


def run(leases: Leases) -> None:
    program = Program(0, (), (ProgramStep("t:torch.ones", [1], {}),), Tuple([Ref(0)]))
    RemoteProgram(program, 1).run((), leases)


def test_lease_is_asked_for_again_when_the_connection_was_lost_meanwhile() -> None:
    leases = Leases(ConnectionLost("closed"), RemoteFailure("not allowed", "another reason"))
    with pytest.raises(RemoteFailure, match="another reason"):
        run(leases)
    assert leases.asked == 2


def test_call_may_be_made_again_when_every_manager_is_lost() -> None:
    leases = Leases(ConnectionLost("closed"), ConnectionLost("closed"))
    with pytest.raises(RemoteFailure, match="the GPU manager was lost 2 times") as raised:
        run(leases)
    assert isinstance(error_of(raised.value), GpuUnavailable)


def test_error_names_the_manager_that_did_not_come_back() -> None:
    away = ManagerUnreachable("unix:/node.sock", "connection refused")
    leases = Leases(ConnectionLost("closed"), away)
    with pytest.raises(ManagerUnreachable) as raised:
        run(leases)
    assert raised.value is away
    assert away.answer_status == 503


def test_weights_are_sent_again_once_when_the_node_does_not_know_them() -> None:
    unknown = RemoteFailure(FailureKind.UNKNOWN_MODEL, "no image")
    leases = Leases(unknown, unknown)
    with pytest.raises(RemoteFailure) as raised:
        run(leases)
    assert raised.value is unknown
    assert (leases.asked, leases.forgotten) == (2, 1)
