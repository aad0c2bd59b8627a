"""What the tests of passed data put, take and compute in a worker."""

from typing import Any

import torch

from gpu_manager.worker.program.inputs import InputStorage
from tests.kit.worlds.caller import LEASE, Caller, LocalWorker, program, step
from torch_shim.wire.programs import Ref
from torch_shim.wire.protocol import FrameKind

HANDLE = "node." + "h" * 32
KEY, TAKEN = 1 << 40, 77
SIZE = 1 << 16
DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
TOTAL = program(step("m:sum", Ref(0)), output=[Ref(1)])
GROW = program(step("m:add_", Ref(0), 1), step("m:sum", Ref(0)), output=[Ref(2)])
STAYS = [None, None, [], None, "", None, [KEY, 1, {}, []]]


def published(caller: Caller, value: float = 3.0) -> None:
    """A result that stays with the worker, and is put by its handle."""
    caller.call(DOUBLE, torch.full((SIZE,), value), options=STAYS)
    caller.ask(FrameKind.PUBLISH, [KEY, 0, b"about", HANDLE])


def taken(key: int = TAKEN) -> list[Any]:
    """The put tensor as an input."""
    return [[1, key, 0], "float32", [SIZE], [1], 0]


def total(caller: Caller, what: Any = TOTAL, key: int = TAKEN, lease: int = LEASE) -> float:
    (found,) = caller.call(what, taken(key), lease=lease).outputs
    return float(found)


def storage_of(worker: LocalWorker, session: str, key: int) -> InputStorage:
    kept = worker.executor.sessions._sessions[session]  # noqa: SLF001 - to look at addresses
    found = kept.find(key, 0)
    assert found is not None
    return found
