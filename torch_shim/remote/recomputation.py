"""Computes again what a worker had alone when it died, by repeating the calls that made it.

An output remembers its call: the program, the model's weights, copies of inputs of a few KiB (token
ids), one element of larger inputs whose elements are all equal (an empty cache), and of other large
inputs the calls that made those. So the cache of a language model is the chain of its text's calls.
Nothing large is kept alive for it: a large input that the function has is referred to weakly, and a
call that lacks one which no call made, or whose weights were written to since, cannot be repeated.
Nor can one that draws random numbers or writes to its inputs.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torch_shim.errors import NoWeights, RemoteFailure
from torch_shim.remote.values import Bound
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import AbsentBytes, absent_of, make_under
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, become_cuda
from torch_shim.wire.arithmetic import settings_to_send
from torch_shim.wire.protocol import FailureKind
from torch_shim.wire.shared_memory import is_lazy, tensor_over

# An input of at most this size is copied, so that the call can be repeated.
MOST_COPIED_BYTES = 16 << 10
_MOST_DEPTH = 1024  # calls of which each needs the one before
_MOST_CALLS = 16384  # for one tensor
_MOST_NESTED = 2  # workers that die while calls are repeated
# Integers of a size, by which elements are compared: by its own type, no NaN equals another.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Runs a program with these inputs, on whatever worker, and returns its outputs.
Run = Callable[[Sequence[Any]], list[Any]]


class _Made(NamedTuple):
    """An input that an earlier call made: an output of it, seen as this."""

    call: "RememberedCall"
    output: int
    layout: tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


class MadeBy(NamedTuple):
    """The call that made the content of a storage."""

    call: "RememberedCall"
    output: int
    content: tuple[int, int]


class _Uniform(NamedTuple):
    """A large input whose elements are all equal."""

    element: torch.Tensor
    size: torch.Size
    on_gpu: bool

    def whole(self) -> torch.Tensor:
        tensor = self.element.expand(self.size).contiguous()
        return become_cuda(tensor) if self.on_gpu else tensor


class _Elsewhere(NamedTuple):
    """An input that the function has, if it still has it and has not written to it."""

    tensor: "weakref.ref[torch.Tensor]"
    content: tuple[int, int]
    made: _Made | None  # if a call made it

    def had_from(self) -> "torch.Tensor | _Made":
        """Return the tensor, or the output of a call that it is."""
        tensor = self.tensor()
        if tensor is not None and write_epochs.content_of(tensor) == self.content:
            return tensor
        if self.made is None:
            raise _lost("an input that it was computed from is gone, or was written to")
        return self.made


class RememberedCall:
    """One call, and the handles without bytes that it made."""

    def __init__(self, run: Run, bound: Bound, inputs: list[Any], depth: int) -> None:
        self.depth = depth
        self._bound = weakref.ref(bound)
        self._inputs = inputs  # as `RememberedInputs` has them
        self._run = run
        self._settings = settings_to_send()
        self._made: list[tuple[int, weakref.ref[AbsentBytes]]] = []

    def made(self, output: int, mark: write_epochs.WriteMark, content: tuple[int, int]) -> None:
        """Note that a storage is this output, perhaps one whose bytes only the worker has."""
        mark.made_by = MadeBy(self, output, content)
        absent: AbsentBytes | None = mark.absent
        if absent is not None and absent.absent:
            self._made.append((output, weakref.ref(absent)))
            absent.call = self

    def restore(self) -> None:
        """Compute the bytes of every handle of this call that is still without them.

        Then what waits to be made from these is made: they may be written to from now on.
        """
        filled = []
        with _repeating.lock, NoTorchFunction(), torch.no_grad():
            if _repeating.depth >= _MOST_NESTED:
                raise _lost("workers died while it was computed again")
            _repeating.depth += 1
            try:
                outputs = _repeat(self)
            finally:
                _repeating.depth -= 1
            for output, reference in self._made:
                absent = reference()
                if absent is not None:
                    found = absent_of(outputs[output])
                    if found is not None:
                        found.bring(looks=False)
                    storage = write_epochs.storage_of(outputs[output])
                    absent.fill(storage)
                    filled.append(absent.key)
        for key in filled:
            make_under(key)

    def had_from(self) -> list[Any]:
        """Return its inputs, as `_Made`, `_Uniform` or values; RemoteFailure if one is lost."""
        return [item.had_from() if isinstance(item, _Elsewhere) else item for item in self._inputs]

    def run(self, inputs: list[Any], outputs: dict["RememberedCall", list[Any]]) -> list[Any]:
        """`outputs` are those of the earlier calls."""
        bound = self._bound()
        if bound is None or not bound.unchanged():
            raise _lost("the weights that it was computed with have changed")
        if self._settings != settings_to_send():
            raise _lost("it was computed with other settings of autocast or arithmetic")
        args = [_value(value, outputs) for value in inputs]
        for position, value in bound.given():
            args[position] = value
        try:
            results = self._run(args)
        except NoWeights as error:
            raise _lost("the model that it was computed with is gone") from error
        return [become_cuda(one) if type(one) is torch.Tensor else one for one in results]


class _Repeating:
    """One thread at a time computes something again, perhaps for what it computes again."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """In a forked child: the thread that had the lock is not there."""
        self.lock = threading.RLock()
        self.depth = 0


_repeating = _Repeating()
os.register_at_fork(after_in_child=_repeating.renew)


class RememberedInputs(NamedTuple):
    """The inputs of a call that may be repeated, and how long the chain of calls to it is."""

    values: list[Any]  # as `_Made`, `_Uniform`, `_Elsewhere`, or values
    depth: int


def remembered_inputs(args: Sequence[Any], bound: Bound) -> RememberedInputs | None:
    """Note the inputs of a call that has changed none of them; None if one cannot be had again."""
    inputs: list[Any] = [None] * len(args)
    depth = 1
    for position in bound.others:
        value = args[position]
        if isinstance(value, torch.Tensor):
            value = _remembered(value)
            if value is None:
                return None
            made_by = value.made if isinstance(value, _Elsewhere) else value
            if isinstance(made_by, _Made):
                depth = max(depth, made_by.call.depth + 1)
        inputs[position] = value
    return RememberedInputs(inputs, depth)


def remember(
    run: Run,
    inputs: RememberedInputs,
    bound: Bound,
    made: Iterable[tuple[int, torch.Tensor]],
) -> None:
    """Have these outputs of a call remember it; each has its number."""
    call = RememberedCall(run, bound, *inputs)
    for number, output in made:
        call.made(number, write_epochs.marked(output), write_epochs.content_of(output))


def _remembered(value: torch.Tensor) -> Any:
    if absent_of(value) is not None:
        return _made(value)
    if value.numel() * value.element_size() <= MOST_COPIED_BYTES:
        with NoTorchFunction():
            copy = value.detach().clone()
        return become_cuda(copy) if isinstance(value, CudaTensor) else copy
    return _uniform(value) or _Elsewhere(
        weakref.ref(value), write_epochs.content_of(value), _made(value)
    )


def _layout(value: torch.Tensor) -> tuple[torch.dtype, int, torch.Size, tuple[int, ...]]:
    return value.dtype, int(value.storage_offset()), value.size(), value.stride()


def _made(value: torch.Tensor) -> _Made | None:
    """Return the output of a call that a tensor is; None if it is none, or its chain is too long.

    If the function has the bytes, the tensor itself then begins a new chain.
    """
    origin = None if is_lazy(value) else write_epochs.marked(value).made_by
    if not isinstance(origin, MadeBy) or origin.content != write_epochs.content_of(value):
        return None
    if origin.call.depth >= _MOST_DEPTH:
        return None
    return _Made(origin.call, origin.output, _layout(value))


def _uniform(value: torch.Tensor) -> _Uniform | None:
    """Return how to make a large tensor anew; None unless the bits of its elements are equal."""
    bits = _INTEGERS.get(value.element_size())
    if bits is None or value.is_quantized or is_lazy(value):
        return None
    if not value.is_contiguous():
        return None
    with NoTorchFunction():
        elements = value.detach().as_subclass(torch.Tensor).view(-1)
        seen = elements.view(bits)
        if not torch.equal(seen[1:], seen[:-1]):  # ends at the first difference
            return None
        return _Uniform(elements[:1].clone(), value.size(), isinstance(value, CudaTensor))


def _value(value: Any, outputs: dict[RememberedCall, list[Any]]) -> Any:
    if isinstance(value, _Made):
        storage = write_epochs.storage_of(outputs[value.call][value.output])
        return become_cuda(tensor_over(storage, *value.layout))
    return value.whole() if isinstance(value, _Uniform) else value


def _repeat(last: RememberedCall) -> list[Any]:
    """Run the calls that lead to this one, the first one first; return the outputs of this one."""
    inputs = _inputs_of(last)
    users: dict[RememberedCall, int] = {}
    for values in inputs.values():
        for earlier in _earlier(values):
            users[earlier] = users.get(earlier, 0) + 1
    outputs: dict[RememberedCall, list[Any]] = {}
    for call in sorted(inputs, key=lambda call: call.depth):
        outputs[call] = call.run(inputs[call], outputs)
        for earlier in _earlier(inputs[call]):
            users[earlier] -= 1
            if not users[earlier]:
                del outputs[earlier]  # a cache of each step is more than a worker has room for
    return outputs[last]


def _inputs_of(last: RememberedCall) -> dict[RememberedCall, list[Any]]:
    """Return the inputs of a call and of all before it, with those that the function has."""
    inputs: dict[RememberedCall, list[Any]] = {}
    waiting = [last]
    while waiting:
        call = waiting.pop()
        if call not in inputs:
            inputs[call] = call.had_from()
            waiting += _earlier(inputs[call])
            if len(inputs) > _MOST_CALLS:
                raise _lost(f"more than {_MOST_CALLS} calls would have to be repeated")
    return inputs


def _earlier(inputs: Iterable[Any]) -> set[RememberedCall]:
    return {value.call for value in inputs if isinstance(value, _Made)}


def _lost(reason: str) -> RemoteFailure:
    return RemoteFailure(FailureKind.LOST, reason, {})
