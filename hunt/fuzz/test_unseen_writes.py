"""Over every operator that programs may name: nothing is written to a tensor without being seen."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import increment_version

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.calls.call import leave_modes
from gpu_manager.worker.executor import OPERATOR_ERRORS
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.written_tensors import may_write
from hunt.fuzz.arguments import NotStorable, TensorArgument, made
from hunt.fuzz.cases import Case, Cases
from torch_shim.wire.programs import ProgramStep, Ref

_CASES = 2  # of each name
_FEWEST = 3500  # calls that have to succeed
_MOST_BYTES = 2 << 30  # that an operator may take: some are asked for 50 GB


class _Watched:
    """The tensors that an operator is called with, as they were before."""

    def __init__(self, arguments: Any) -> None:
        self.tensors = [each for each in _leaves(arguments) if isinstance(each, torch.Tensor)]
        self._bytes = [_bytes_of(tensor) for tensor in self.tensors]
        self._versions = [tensor._version for tensor in self.tensors]  # noqa: SLF001 - autograd's

    def unseen(self) -> bool:
        """Whether something was written to one whose version is as it was."""
        seen = [now._version != was for now, was in zip(self.tensors, self._versions, strict=True)]  # noqa: SLF001 - as above
        return any(was and not is_seen for was, is_seen in zip(self.written(), seen, strict=True))

    def written(self) -> list[bool]:
        """Which of them have other bytes now."""
        pairs = zip(self.tensors, self._bytes, strict=True)
        return [not torch.equal(_bytes_of(tensor), was) for tensor, was in pairs]

    def aliases_unseen(self, given: Any) -> bool:
        """Whether something in the same memory has a version of its own."""
        for found in filter(_has_memory, _leaves(given)):
            for tensor in self.tensors:
                if found is tensor or not _is_same_memory(found, tensor):
                    continue
                before = tensor._version  # noqa: SLF001 - as above
                increment_version(found)
                if tensor._version == before:  # noqa: SLF001 - as above
                    return True
        return False


@pytest.mark.filterwarnings("ignore")
def test_writes_are_seen_when_any_operator_is_called() -> None:
    cases, found, calls = Cases(OperatorTable(torch.device("cpu"))), list[str](), 0
    with _little_memory():
        for case in (Case(name, number) for name in cases.names for number in range(_CASES)):
            with torch.no_grad():
                outcome = _looked_at(cases, case)
            calls += outcome is not None
            found += outcome or []
    assert not found
    assert calls > _FEWEST


@contextmanager
def _little_memory() -> Iterator[None]:
    """In which this process gets no more than this; what is too much is an error of torch's."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    (used,) = re.findall(
        r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 1024 + _MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _looked_at(cases: Cases, case: Case) -> list[str] | None:
    """What is wrong with a call; None where it cannot be made."""
    try:
        arguments, named, chance = cases.described(case)
        ready = made([arguments, named], chance)
        watched = _Watched(ready)
    except (NotStorable, RuntimeError):
        return None
    operator, found, given, is_done = cases.table.find(case.name), list[str](), None, False
    torch.manual_seed(case.number)
    try:
        given, is_done = operator(*ready[0], **ready[1]), True  # type: ignore[misc] # the name is of the table
    except (*OPERATOR_ERRORS, CallRefused):
        pass
    finally:
        leave_modes()
    step = ProgramStep(case.name, _described(arguments), _described(named))
    if any(watched.written()) and not may_write(step):
        found.append(f"{case}: is said to write to nothing")
    if is_done and watched.unseen():
        found.append(f"{case}: wrote unseen")
    if is_done and watched.aliases_unseen(given):
        found.append(f"{case}: what it gives has a version of its own")
    return found if is_done or found else None


def _described(value: Any) -> Any:
    """The arguments as a program has them."""
    if isinstance(value, TensorArgument):
        return Ref(0)
    if isinstance(value, list):
        return [_described(each) for each in value]
    return (
        {key: _described(each) for key, each in value.items()} if isinstance(value, dict) else value
    )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _has_memory(value: Any) -> bool:
    functorch = torch._C._functorch  # noqa: SLF001 - torch has no public way to ask
    return isinstance(value, torch.Tensor) and not functorch.is_functorch_wrapped_tensor(value)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    place = one.untyped_storage().data_ptr()
    return place != 0 and place == other.untyped_storage().data_ptr()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).clone()
