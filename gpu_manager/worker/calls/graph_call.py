"""A call as it was asked for: read from the wire and checked."""

from typing import Any, NamedTuple

import torch

from gpu_manager.worker.call_errors import CallRefused
from gpu_manager.worker.calls.calls_together import CallNeeds
from gpu_manager.worker.calls.thread_modes import Mode
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.channel_state import Binding, ChannelState
from gpu_manager.worker.program.tensor_specs import DTYPES
from torch_shim.wire.arithmetic import Arithmetic, read_arithmetic
from torch_shim.wire.bounded_msgpack import shown
from torch_shim.wire.protocol import FailureKind

_CALL_FIELDS, _OPTION_FIELDS = 5, 8
_TRACE_CHARACTERS = 128


class Residents(NamedTuple):
    """What the shim says about outputs and changed inputs that it may never look at.

    Storages of at least `least_bytes` stay with the worker, output storage n under `first_key` + n,
    unless it is `wanted` up to its size. `dropped` are the keys of those that the function needs no
    more, or the negative numbers of files of results that it gives back.
    """

    first_key: int
    least_bytes: int
    wanted: dict[int, int]
    dropped: list[int]


class Options(NamedTuple):
    """How a call is to be run. One that `repeats` another was in a worker that died."""

    autocast: torch.dtype | None
    rng: bytes | None
    keys: list[int]
    default_dtype: torch.dtype
    trace: str = ""
    arithmetic: Arithmetic = Arithmetic()
    residents: Residents | None = None
    repeats: bool = False

    def mode(self) -> Mode:
        """What of it changes the numbers that a program computes."""
        return Mode(self.autocast, self.default_dtype, self.arithmetic)


class GraphCall(NamedTuple):
    """A call as it was asked for."""

    lease: int
    number: int
    program: BuiltProgram
    binding: Binding | None
    inputs: Any
    options: Options

    @property
    def needs(self) -> CallNeeds:
        """What the call needs of the process while it runs."""
        options = self.options
        return CallNeeds(options.arithmetic, options.default_dtype, options.rng is not None)


def read_call(meta: Any, channel: ChannelState) -> GraphCall:
    """Check what a CALL says, and find the program and binding it names."""
    if not isinstance(meta, list) or len(meta) != _CALL_FIELDS or type(meta[0]) is not int:
        raise CallRefused(FailureKind.BAD_FRAME, "CALL has five fields, the lease first")
    lease, number, binding, inputs, options = meta
    program = channel.program(number)
    bound, read = channel.binding(number, binding), read_options(options)
    if program.random and read.rng is None:
        raise CallRefused(FailureKind.BAD_FRAME, "a program that draws has a generator's state")
    return GraphCall(lease, number, program, bound, inputs, read)


def read_options(options: Any) -> Options:
    """Check a call's options."""
    if not isinstance(options, list) or len(options) != _OPTION_FIELDS:
        raise CallRefused(FailureKind.BAD_FRAME, "options have eight fields")
    autocast, rng, keys, default, trace, sent, stay, repeats = options
    arithmetic = Arithmetic() if sent is None else read_arithmetic(sent)
    if arithmetic is None:
        raise CallRefused(FailureKind.BAD_FRAME, f"no settings of arithmetic: {shown(sent)}")
    if not isinstance(trace, str) or len(trace) > _TRACE_CHARACTERS:
        raise CallRefused(FailureKind.BAD_FRAME, "a trace is a short text")
    if autocast is not None:
        if not isinstance(autocast, list) or len(autocast) != len(("dtype", "cache")):
            raise CallRefused(FailureKind.BAD_FRAME, "autocast is a dtype and whether to cache")
        autocast = _dtype(autocast[0])  # casts are never kept: see `leave_modes`
    if rng is not None and not isinstance(rng, bytes):
        raise CallRefused(FailureKind.BAD_FRAME, "a generator's state is bytes")
    if not isinstance(keys, list) or not _are_numbers(keys):
        raise CallRefused(FailureKind.BAD_FRAME, "keys are numbers")
    dtype = torch.float32 if default is None else _dtype(default)
    if type(repeats) is not bool:
        raise CallRefused(FailureKind.BAD_FRAME, "a call repeats another one or does not")
    stays = _read_residents(stay)
    return Options(autocast, rng, keys, dtype, trace, arithmetic, stays, repeats)


def _read_residents(sent: Any) -> Residents | None:
    match sent:
        case None:
            return None
        case [int(first), int(least), list(wanted), list(dropped)] if first > 0:
            numbers = [*dropped, *(number for entry in wanted for number in _pair(entry))]
            if _are_numbers(numbers):
                return Residents(first, least, dict(wanted), dropped)
    raise CallRefused(FailureKind.BAD_FRAME, f"what stays: {shown(sent)}")


def _are_numbers(values: list[Any]) -> bool:
    return not values or set(map(type, values)) == {int}


def _pair(entry: Any) -> Any:
    return entry if isinstance(entry, list) and len(entry) == len(("number", "size")) else [None]


def _dtype(name: Any) -> torch.dtype:
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found is None or not found.is_floating_point:
        raise CallRefused(FailureKind.BAD_FRAME, f"no dtype {shown(name)} to compute in")
    return found
