"""Operators that run on the worker between graphs, because only the worker has their input.

Beam search selects rows of a cache after every step, for example: without this, the whole cache
would come back each time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torch_shim.errors import RemoteFailure
from torch_shim.leases.leasing import SessionLease
from torch_shim.process_report import report
from torch_shim.raised_failures import error_of
from torch_shim.remote.program import RemoteProgram
from torch_shim.tensors.dispatch import Operator
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, become_cuda
from torch_shim.wire.programs import Ellipse, Named, Program, ProgramStep, Ref, Slice, Tuple
from torch_shim.wire.protocol import FailureKind

# What moves rows of a tensor, by the names of functions and methods, as programs name it.
_OPERATORS = {
    "__getitem__": "o:getitem",
    "cat": "t:torch.cat",
    "clone": "m:clone",
    "concat": "t:torch.cat",
    "contiguous": "m:contiguous",
    "gather": "m:gather",
    "index_select": "m:index_select",
    "repeat": "m:repeat",
    "repeat_interleave": "m:repeat_interleave",
}
_MOST_PROGRAMS = 256  # that are remembered; one differs by its numbers, such as a slice's end
_NUMBERS = (bool, int, float, str, type(None))

_programs: dict[bytes, RemoteProgram] = {}

LeaseFor = Callable[[int], SessionLease]


class _Unsuitable(Exception):
    """An argument that a program cannot express, or that is not on the GPU."""


def run_there(lease_for: LeaseFor, func: Operator, args: Sequence[Any], kwargs: Any) -> Any:
    """Return a handle to an operator's result on the worker; None if it has to run here."""
    name = _OPERATORS.get(getattr(func, "__name__", ""))
    if name is None:
        return None
    tensors: list[torch.Tensor] = []
    try:
        arguments = [_argument(value, tensors) for value in args]
        named = {key: _argument(value, tensors) for key, value in (kwargs or {}).items()}
    except _Unsuitable:
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    shifted = len(tensors)
    step = ProgramStep(name, arguments, named)
    program = _known(Program(shifted, (), (step,), Tuple([Ref(shifted)])))
    try:
        with NoTorchFunction():
            (result,) = program.run(tensors, lease_for, partial(run_there, lease_for))
    except RemoteFailure as failure:
        if failure.failure == FailureKind.LOST:
            raise error_of(failure) from failure
        report.local_call(f"{failure.failure}: {failure.message}"[:200], 1, "an operator")
        return None
    return become_cuda(result)


def _known(program: Program) -> RemoteProgram:
    packed = program.pack()
    remote_program = _programs.get(packed)
    if remote_program is None:
        if len(_programs) >= _MOST_PROGRAMS:
            _programs.clear()
        remote_program = _programs.setdefault(packed, RemoteProgram(program, 1))
    return remote_program


def _argument(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return an argument as programs have it; add its tensors to the program's inputs."""
    of_class = isinstance(value, CudaTensor) and not isinstance(value, torch.nn.Parameter)
    if of_class and value.layout is torch.strided:
        tensors.append(value)
        return Ref(len(tensors) - 1)
    if type(value) in _NUMBERS:
        return value
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return Slice(*(_argument(part, tensors) for part in parts))
    if isinstance(value, list):
        return [_argument(item, tensors) for item in value]
    if isinstance(value, tuple):
        return Tuple([_argument(item, tensors) for item in value])
    if isinstance(value, torch.memory_format):
        return Named("memory_format", str(value).removeprefix("torch."))
    if value is ...:
        return Ellipse()
    raise _Unsuitable
