"""What a call gives back that ends before its worker was asked."""

from typing import Any

import pytest

from torch_shim.leases.leasing import ModelLeases, SessionLease
from torch_shim.remote.program import RemoteProgram
from torch_shim.weights import ModelImage
from torch_shim.wire.manager_session import ModelLease, WorkerPeer
from torch_shim.wire.programs import Program, ProgramStep, Ref, Tuple


class Session:
    """Its only channel is out, or back."""

    def __init__(self) -> None:
        self.out = 0
        self.running = 0

    def channel(self, *_: object) -> str:
        self.out += 1
        return "a channel"

    def give(self, _: ModelLease, channel: str) -> None:
        assert channel == "a channel"
        self.out -= 1

    def begin_call(self) -> None:
        self.running += 1

    def end_call(self, *, answered: bool) -> None:
        assert not answered
        self.running -= 1


def test_channel_and_lease_are_given_back_when_a_call_ends_while_it_is_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    class Leases(ModelLeases):
        def lease_for(self, _: int) -> SessionLease:
            lease = ModelLease(1, "d", WorkerPeer("worker.1", "node"), session)
            return SessionLease(ModelImage("d", {}), lease, session)

    session: Any = Session()
    leases: Any = None
    monkeypatch.setattr("torch_shim.remote.program.StayingOutputs", interrupted)
    program = Program(0, (), (ProgramStep("t:torch.ones", [1], {}),), Tuple([Ref(0)]))
    with pytest.raises(KeyboardInterrupt):
        RemoteProgram(program, 1).run((), Leases(leases, leases))
    assert (session.out, session.running) == (0, 0)
