"""A call: read from the wire and checked, its modes, its channel, and its result."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch

from gpu_manager.call_errors import CallRefused, ContextLost
from gpu_manager.worker.calls.calls_together import CallNeeds
from gpu_manager.worker.orders import USUAL_TERMS, LeaseTerms
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.inputs import (
    Binding,
    ChannelState,
    InputStorage,
    TensorInput,
)
from gpu_manager.worker.program.plain_values import begin_call
from gpu_manager.worker.program.tensor_specs import DTYPES, NAMES, bytes_of, extent_of, identity
from torch_shim.wire.arithmetic import arithmetic_in_force
from torch_shim.wire.messages import (
    STAYS,
    Arithmetic,
    Call,
    CallOptions,
    CallResult,
    ChangedInput,
    OutputPart,
    SentOutput,
)
from torch_shim.wire.protocol import FailureKind

# What changes a program's numbers beside its inputs: each call begins with exactly its own modes.
#
# Torch keeps autocast, the gradient mode and vmap's levels for each thread. They are set, never
# only left: a program that fails, or leaves in another order than it entered, restores what it
# should not.

_functorch = torch._C._functorch  # noqa: SLF001 - torch has no public way to ask
_fills = torch._C._get_deterministic_fill_uninitialized_memory  # noqa: SLF001 - the public one takes longer
_USUAL = Arithmetic()
_DTYPES = (("cpu", torch.bfloat16), ("cuda", torch.float16))  # of autocast where nobody names one


class Mode(NamedTuple):
    """What changes the numbers that a program computes, beside its inputs."""

    autocast: torch.dtype | None
    default_dtype: torch.dtype
    arithmetic: Arithmetic = Arithmetic()


class Computing:
    """Computes in exactly this mode inside of the `with` block, and leaves nothing entered.

    ContextLost where the process computes otherwise: other calls may rely on that.
    """

    def __init__(self, device: torch.device, mode: Mode, *, enters: bool = True) -> None:
        """Without `enters` nothing in the block can enter anything: after other calls nothing is
        entered then."""
        self._device = device
        self._mode = mode
        self._enters = enters or mode.autocast is not None

    def __enter__(self) -> None:
        _check_process(self._mode)
        if self._enters or not _thread.has_left:
            leave_modes()
        begin_call()
        if self._mode.autocast is not None:
            autocast = torch.autocast(self._device.type, self._mode.autocast, cache_enabled=False)
            autocast.__enter__()  # type: ignore[no-untyped-call] # torch gives it no types

    def __exit__(self, *_: object) -> None:
        if self._enters:
            leave_modes()
            _thread.has_left = True


class _ThreadModes(threading.local):
    """Whether this thread has left all modes, once: since then it leaves what it enters."""

    has_left = False


_thread = _ThreadModes()


def leave_modes() -> None:
    """Leave all that the thread's programs entered.

    Autocast keeps no casts here: only those of tensors that need gradients would be kept, which
    inputs and weights do not, and they would be the process's until some thread left autocast.
    """
    while _functorch.get_dynamic_layer_stack_depth():
        _functorch.pop_dynamic_layer_stack()
    for kind, dtype in _DTYPES:
        torch.set_autocast_enabled(kind, False)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(False)
    entered = torch.autocast_increment_nesting()
    for _ in range(entered):
        torch.autocast_decrement_nesting()
    for _ in range(-entered):
        torch.autocast_increment_nesting()
    torch._C._set_grad_enabled(False)  # noqa: SLF001 - the public one makes an object


def _check_process(mode: Mode) -> None:
    if torch.is_inference_mode_enabled():
        raise ContextLost("the thread is in inference mode", of_program=False)
    in_force = torch.get_default_dtype(), arithmetic_in_force(), _fills()
    if in_force != (mode.default_dtype, mode.arithmetic, True):
        raise ContextLost(f"the process computes with {in_force}", of_program=False)


class ChannelCall(NamedTuple):
    """A call as it came over a channel: what it asks for, and where its answer goes.

    `deliver` copies the result's bytes to where they go, before any other call runs that could
    write to them. `terms` are those of its lease.
    """

    lease: int
    number: int  # of the program, on the channel
    program: BuiltProgram
    binding: Binding | None
    inputs: list[Any]
    options: CallOptions
    mode: Mode
    channel: ChannelState
    body: memoryview
    deliver: "Deliver"
    terms: LeaseTerms = USUAL_TERMS
    recorded: "Recording | None" = None  # of one that runs again

    @property
    def needs(self) -> CallNeeds:
        mode = self.mode
        return CallNeeds(mode.arithmetic, mode.default_dtype, self.options.rng is not None)


class Recording(Protocol):
    """What is known of a recorded call, and its answer, a whole frame."""

    answer: bytes

    @property
    def trace(self) -> str:
        """The trace of the run that was asked for last."""

    def run(self, executor: Any, asked: ChannelCall, asked_s: float) -> "CallAnswer | None":
        """Run the call and deliver its result; None where it has to be run as others."""

    def deliver(
        self, outputs: Sequence[Any], written: Sequence[TensorInput], times: list[float]
    ) -> "PackedResult":
        """Put outputs where they belong; CallRefused where they do not fit."""


def read_call(
    call: Call, channel: ChannelState, body: memoryview, deliver: "Deliver"
) -> ChannelCall:
    """Find the program and binding that a CALL names, and the mode that it asks for."""
    number, options = call.program, call.options
    program = channel.program(number)
    bound = channel.binding(number, call.binding)
    if program.random and options.rng is None:
        raise CallRefused(FailureKind.BAD_FRAME, "a program that draws has a generator's state")
    asked = call.lease, number, program, bound, call.inputs, options, read_mode(options)
    return ChannelCall(*asked, channel, body, deliver)


def read_mode(options: CallOptions) -> Mode:
    autocast, default = options.autocast, options.default_dtype
    return Mode(
        None if autocast is None else _dtype(autocast),
        torch.float32 if default is None else _dtype(default),
        _USUAL if options.arithmetic is None else options.arithmetic,
    )


def _dtype(name: str) -> torch.dtype:
    dtype = DTYPES.get(name)
    if dtype is None or not dtype.is_floating_point:
        raise CallRefused(FailureKind.BAD_FRAME, f"no dtype {name!r:.80} to compute in")
    return dtype


_WIDEST_ELEMENT_BYTES = 16
# A tensor that uses less of the bytes between its first and last than this travels contiguous.
_LEAST_DENSITY = 0.25
_SPARSE_FROM_BYTES = 1 << 16


_LEAST, _LARGEST = -1 << 63, (1 << 64) - 1  # of the whole numbers that a message may contain


class PackedResult(NamedTuple):
    """What RESULT says, with offsets still to be filled in, and the bytes in their order."""

    storages: list[OutputPart]
    views: list[Any]
    changed: list[ChangedInput]
    parts: list[torch.Tensor]

    def sizes(self) -> list[int]:
        return [part.numel() for part in self.parts]

    def place(self, offsets: Sequence[int]) -> None:
        parts: list[OutputPart | ChangedInput] = [*self.storages, *self.changed]
        sent = [part for part in parts if part.offset != STAYS]
        for part, offset in zip(sent, offsets, strict=True):
            part.offset = offset


class Packer:
    """Describes the outputs of one call. `inputs` gives the input that lies in a storage."""

    def __init__(
        self, asked: ChannelCall, inputs: Sequence[dict[int, int]], *, lasting: bool
    ) -> None:
        """Outputs that are not `lasting` lie in memory that the next call uses again."""
        constants = asked.program.constants
        self._constants = {identity(constant.untyped_storage()) for constant in constants}
        self._inputs = inputs
        self._lasting = lasting
        self._kept = asked.channel.kept
        self._keys, self._residents = asked.options.keys, asked.options.residents
        self._storages: list[OutputPart] = []
        self._parts: list[torch.Tensor] = []

    def pack(self, outputs: Sequence[Any], changed: list[TensorInput]) -> PackedResult:
        """The result of a call that gave these outputs and wrote to these inputs."""
        views: list[Any] = list(outputs)
        owned: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for number, output in enumerate(outputs):
            if isinstance(output, torch.Tensor):
                tensor = plain_output(output)
                storage = identity(tensor.untyped_storage())
                found = (places[storage] for places in self._inputs if storage in places)
                source = next(found, None)
                if source is None:
                    owned.setdefault(storage, []).append((number, tensor))
                else:
                    views[number] = _described(-1 - source, tensor, 0)
            elif output is not None and not isinstance(output, (bool, int, float)):
                detail = f"output {number} is a {type(output).__name__}"
                raise CallRefused(FailureKind.OPERATOR, detail)
            elif isinstance(output, int) and not _LEAST <= output <= _LARGEST:
                raise CallRefused(FailureKind.OPERATOR, f"output {number} has more than 64 bits")
        for group in owned.values():
            self._storage(group, views)
        written = [self._changed(entry) for entry in changed]
        return PackedResult(self._storages, views, written, self._parts)

    def _storage(self, group: list[tuple[int, torch.Tensor]], views: list[Any]) -> None:
        """Outputs over one storage: each run of bytes that some of them share is one piece."""
        spans = sorted((extent_of(tensor), number, tensor) for number, tensor in group)
        piece: list[tuple[int, torch.Tensor]] = []
        start = stop = 0
        for (first, last), number, tensor in spans:
            if piece and first >= stop:
                self._piece(piece, start, stop, views)
                piece = []
            if not piece:
                start = first - first % _WIDEST_ELEMENT_BYTES
                stop = start
            piece.append((number, tensor))
            stop = max(stop, last)
        self._piece(piece, start, stop, views)

    def _piece(
        self, piece: list[tuple[int, torch.Tensor]], start: int, stop: int, views: list[Any]
    ) -> None:
        if len(piece) == 1 and _is_sparse(piece[0][1], stop - start):
            number, tensor = piece[0]
            piece = [(number, tensor.contiguous())]
            start, stop = 0, piece[0][1].numel() * tensor.element_size()
        storage = piece[0][1].untyped_storage()
        here = len(self._storages)
        for number, tensor in piece:
            views[number] = _described(here, tensor, start // tensor.element_size())
        if self._stays(here, stop - start):
            assert self._residents is not None
            own = self._own(storage, start, stop)
            self._kept.keep_sole(InputStorage(own, self._residents.first_key + here))
            self._storages.append(OutputPart(STAYS, stop - start, True))
            return
        key = self._keys[here] if here < len(self._keys) else 0
        if key:
            self._kept.keep(InputStorage(self._own(storage, start, stop), key))
        self._storages.append(OutputPart(0, stop - start, bool(key)))
        self._parts.append(bytes_of(storage, start, stop))

    def _stays(self, number: int, size_bytes: int) -> bool:
        """Whether this output storage stays here until the function looks at it."""
        residents = self._residents
        return (
            residents is not None
            and size_bytes >= max(residents.least_bytes, 1)
            and size_bytes > residents.wanted.get(number, 0)
            and self._kept.has_room(size_bytes)
        )

    def _own(self, whole: torch.UntypedStorage, start: int, stop: int) -> torch.UntypedStorage:
        """Part of a storage that may be kept: a copy where it belongs to more than this result."""
        part: torch.UntypedStorage = whole[start:stop]
        shared = identity(whole) in self._constants or not self._lasting
        if shared or whole.nbytes() > 2 * (stop - start):
            part = part.clone()  # type: ignore[no-untyped-call] # torch gives it no types
        return part

    def _changed(self, entry: TensorInput) -> ChangedInput:
        start, stop = extent_of(entry.tensor)
        residents, key = self._residents, entry.held.key
        if residents is not None and key and stop - start >= max(residents.least_bytes, 1):
            is_sole = self._kept.has_sole(key)
            if not is_sole and self._kept.has_room(entry.held.storage.nbytes()):
                self._kept.keep_sole(entry.held)
                is_sole = True
            if is_sole:
                return ChangedInput(entry.position, STAYS, stop - start)
        self._parts.append(bytes_of(entry.tensor.untyped_storage(), start, stop))
        return ChangedInput(entry.position, 0, stop - start)


def plain_output(output: torch.Tensor) -> torch.Tensor:
    """The output with its values really in its storage."""
    if output.layout is not torch.strided or output.dtype not in NAMES:
        raise CallRefused(FailureKind.OPERATOR, f"output of layout {output.layout}, {output.dtype}")
    if torch._C._functorch.is_functorch_wrapped_tensor(output):  # noqa: SLF001 - torch has no public way to ask
        raise CallRefused(FailureKind.OPERATOR, "an output is still inside of vmap")
    return output.resolve_conj().resolve_neg()


def _described(storage: int, tensor: torch.Tensor, shift: int) -> SentOutput:
    shape, strides = list(tensor.shape), list(tensor.stride())
    offset = int(tensor.storage_offset()) - shift
    return SentOutput(storage, NAMES[tensor.dtype], shape, strides, offset)


def _is_sparse(tensor: torch.Tensor, span_bytes: int) -> bool:
    used_bytes = tensor.numel() * tensor.element_size()
    return span_bytes > _SPARSE_FROM_BYTES and used_bytes < span_bytes * _LEAST_DENSITY


class CallAnswer(NamedTuple):
    """What a call gave: the result, the generator's state, times, and numbers for the manager.

    The times are seconds: waiting for the GPU, transfer, compute, and of the transfer that back.
    Of calls that ran `together`, as one, each computed for an equal part, and waited for the rest.
    """

    result: PackedResult
    end_bytes: int
    rng: bytes | None
    times: list[float]
    batch: int
    together: int = 1

    def sent(self, file_number: int, recorded: str | None = None) -> CallResult:
        """The answer as it travels, with the number of the file that is to be given back."""
        storages, views, changed, _ = self.result
        times = cast(tuple[float, float, float, float], tuple(self.times))
        return CallResult(storages, views, changed, self.rng, times, file_number, recorded)


# Copies a result's bytes to where the shim will read them.
Deliver = Callable[[CallAnswer], None]
